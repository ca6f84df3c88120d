"""What is done to a shared library before it is shared: stripped, and made to ask for no executable stack.

Pure Python, so that it needs no tool of the platform. Only what the dynamic loader reads is kept: the ELF header, the
program headers and the segments they name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["clean_library", "has_executable_stack", "scrub_paths"]

_MAGIC = b"\x7fELF"
_PT_NOTE, _PT_GNU_STACK = 4, 0x6474E551
_PF_X = 1
_NT_GNU_BUILD_ID = 3
#: Prefixes shorter than this (``/usr``) say nothing about a machine and might be part of something else.
_SHORTEST_PREFIX = 5


@dataclass(frozen=True)
class _Segment:
    """One program header: its place in the file, and what it says."""

    header: int
    kind: int
    flags: int
    offset: int
    size: int


def clean_library(library: bytes, prefixes: Sequence[str] = ()) -> bytes:
    """Return ``library`` stripped, without an executable stack, a build id or the paths in ``prefixes``.

    Symbol tables for debuggers, debug information and section headers go; what ``dlopen`` needs stays, byte for byte
    at its place.

    Raises:
        ValueError: if it is no 64-bit little-endian ELF file.
    """
    data = bytearray(library)
    segments = list(_segments(data))
    end = max(segment.offset + segment.size for segment in segments)
    for segment in segments:
        if segment.kind == _PT_GNU_STACK:
            struct.pack_into("<I", data, segment.header + 4, segment.flags & ~_PF_X)
        elif segment.kind == _PT_NOTE:
            _clear_build_id(data, segment)
    # The section header table is gone: say so (e_shoff; e_shentsize stays, e_shnum, e_shstrndx).
    struct.pack_into("<Q", data, 40, 0)
    struct.pack_into("<HH", data, 60, 0, 0)
    return scrub_paths(bytes(data[:end]), prefixes)


def has_executable_stack(library: bytes) -> bool:
    """True if loading ``library`` would make stacks executable."""
    return any(s.kind == _PT_GNU_STACK and s.flags & _PF_X for s in _segments(library))


def scrub_paths(data: bytes, prefixes: Sequence[str]) -> bytes:
    """Overwrite each of ``prefixes`` by slashes, wherever it occurs; no byte moves."""
    for prefix in sorted(set(prefixes), key=len, reverse=True):
        raw = prefix.rstrip("/").encode()
        if len(raw) >= _SHORTEST_PREFIX:
            data = data.replace(raw, b"/" * len(raw))
    return data


def _segments(data: bytes | bytearray) -> Iterator[_Segment]:
    if data[:4] != _MAGIC or data[4:6] != b"\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    # The table itself must survive, wherever the linker put it.
    yield _Segment(0, 0, 0, table, size * count)
    for index in range(count):
        header = table + index * size
        kind, flags, offset = struct.unpack_from("<IIQ", data, header)
        (file_size,) = struct.unpack_from("<Q", data, header + 32)
        yield _Segment(header, kind, flags, offset, file_size)


def _clear_build_id(data: bytearray, segment: _Segment) -> None:
    """Zero the build id: a hash that takes in the debug information, and so the paths of the build."""
    at, end = segment.offset, segment.offset + segment.size
    while at + 12 <= end:
        name_size, value_size, kind = struct.unpack_from("<III", data, at)
        value = at + 12 + _aligned(name_size)
        if kind == _NT_GNU_BUILD_ID and data[at + 12 : at + 16] == b"GNU\0":
            data[value : value + value_size] = bytes(value_size)
        at = value + _aligned(value_size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3
