"""Zip archives of others (``.pt2`` packages): bounds and names, read from the directory alone."""

from __future__ import annotations

import re
import stat
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

from aitune_hf.hub.objection import Limits, Objection

__all__ = ["ZIP_MAGIC", "check_archive"]

#: The first bytes of an archive.
ZIP_MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4sHHHHIIH")  # end of central directory
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_MEMBER_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,200}(/[A-Za-z0-9_.+-]{1,200}){0,15}/?")
_BYTES_PER_MEMBER = 1024  # of the directory: 46, a name, and what writers add


def check_archive(path: Path, limits: Limits) -> None:
    """Check a zip archive before anything unpacks it.

    Raises ``Objection`` for one that is damaged or could be read in two ways, holds too many files or unpacks to too
    many bytes, or has a member whose name leads elsewhere, appears twice, or is a link.
    """
    try:
        with path.open("rb") as file:
            _check_directory(file, path.name, limits)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
    # NotImplementedError: from zipfile, of a version or a compression that it does not know.
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError, OverflowError) as error:
        raise Objection("malformed", f"{path.name} is no zip archive, or a damaged one: {error}") from error
    seen: set[str] = set()
    for member in members:
        _check_member(member, path.name)
        if member.filename.casefold() in seen:
            raise Objection("malformed", f"{path.name}: {member.filename[:80]!r} appears twice in the archive")
        seen.add(member.filename.casefold())
    unpacked = sum(member.file_size for member in members)
    if unpacked > limits.unpacked_bytes:
        raise Objection(
            "malformed", f"{path.name} unpacks to {unpacked} bytes; at most {limits.unpacked_bytes} are taken"
        )


def _check_member(member: zipfile.ZipInfo, archive: str) -> None:
    # ``orig_filename``: what the directory really says; ``filename`` ends at a NUL.
    name = member.orig_filename
    if not _MEMBER_NAME.fullmatch(name) or any(part in {"", ".", ".."} for part in name.rstrip("/").split("/")):
        raise Objection("malformed", f"{archive}: {name[:80]!r} is no name for a file in an archive")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        raise Objection("malformed", f"{archive}: {name[:80]!r} is a link or a device")
    if member.flag_bits & 1 or member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise Objection("malformed", f"{archive}: {name[:80]!r} is encrypted, or packed in an unusual way")


def _check_directory(file: BinaryIO, name: str, limits: Limits) -> None:
    """Bound the directory before it is read, and see that there is only one way to find it."""
    end = file.seek(0, 2) - _END.size
    file.seek(max(0, end))
    magic, disk, first_disk, _, count, size, offset, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06" or comment or disk or first_disk:
        raise zipfile.BadZipFile("it does not end as an archive without comment does")
    if end >= _LOCATOR64.size:
        file.seek(end - _LOCATOR64.size)
        locator, _, position, _ = _LOCATOR64.unpack(file.read(_LOCATOR64.size))
        if locator == b"PK\x06\x07":
            file.seek(position)
            record = _END64.unpack(file.read(_END64.size))
            if record[0] != b"PK\x06\x06" or position + _END64.size != end - _LOCATOR64.size:
                raise zipfile.BadZipFile("the end of its directory is not where it should be")
            count, size, offset = record[7:]
            end = position
    if offset + size != end:
        raise zipfile.BadZipFile("its directory is not where it should be")
    if count > limits.members or size > limits.members * _BYTES_PER_MEMBER:
        raise Objection("malformed", f"{name} holds {count} files; at most {limits.members} are taken")
