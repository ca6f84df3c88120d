"""Archives that unpack to more than they seem, or to places of their choice."""

from __future__ import annotations

import stat
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO

import pytest
from attack_kit import Victim, data_key, native_key, package

from aitune_hf.hub.objection import Limits

MIB = 1 << 20


def lay(victim: Victim, data: bytes) -> None:
    victim.lay_entry(native_key(), {"model.pt2": data})


def info(name: str, mode: int = 0) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo("placeholder")
    made.filename = made.orig_filename = name
    made.external_attr = mode << 16
    return made


def test_what_unpacks_to_too_much_is_refused(victim: Victim) -> None:
    bomb = package({"model/a": bytes(8 * MIB), "model/b": bytes(8 * MIB)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < MIB
    lay(victim, bomb)
    victim.refused(native_key(), "malformed", "model.pt2 unpacks to", limits=Limits(unpacked_bytes=16 * MIB - 1))


def test_a_claimed_size_counts_even_if_the_data_is_shared(victim: Victim) -> None:
    # Members that overlap: the directory points twice to one member's data, as in "A better zip bomb".
    data = bytearray(package({"model/a": bytes(8 * MIB), "model/b": bytes(8 * MIB)}, zipfile.ZIP_DEFLATED))
    second = data.rfind(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", 0)
    lay(victim, bytes(data))
    victim.refused(native_key(), "malformed", "model.pt2", limits=Limits(unpacked_bytes=9 * MIB))


def test_too_many_members_are_refused_before_the_directory_is_read(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(victim, package({f"model/{number}": b"" for number in range(300)}))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("the directory was read"))
    victim.refused(native_key(), "malformed", "model.pt2 holds 300 files", limits=Limits(members=200))


@pytest.mark.parametrize(
    "name",
    [
        "../evil.so",
        "/tmp/evil.so",
        "model/../../evil.so",
        "model\\..\\evil.so",
        "C:/evil.so",
        "model//evil.so",
        "./evil.so",
        "model/evil.so\x00.json",
        "model/\u202eevil.so",
        "x" * 300,
    ],
)
def test_a_member_that_leads_elsewhere_is_refused(victim: Victim, library: bytes, name: str) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info(name), library)
    lay(victim, buffer.getvalue())
    victim.refused(native_key(), "malformed", "model.pt2")


@pytest.mark.parametrize("names", [("model/a.so", "model/a.so"), ("model/a.so", "model/A.so")])
def test_a_member_that_appears_twice_is_refused(victim: Victim, library: bytes, names: tuple[str, str]) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info(names[0]), b"good")
        data = buffer
        if names[0] != names[1]:
            archive.writestr(info(names[1]), library)
        else:
            archive.NameToInfo.clear()  # else it warns
            archive.writestr(info(names[1]), library)
    lay(victim, data.getvalue())
    victim.refused(native_key(), "malformed", "appears twice")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_a_member_that_is_no_file_is_refused(victim: Victim, kind: int) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info("model/link", kind | 0o777), b"/etc/passwd")
    lay(victim, buffer.getvalue())
    victim.refused(native_key(), "malformed", "is a link or a device")


@pytest.mark.parametrize(
    "twist",
    [
        lambda good, bad: good + bad,
        lambda good, bad: bad[:-22] + good,
        lambda good, bad: good[:-2] + struct.pack("<H", len(bad)) + bad,
        lambda good, bad: good[:-2] + struct.pack("<H", 5),
        lambda good, bad: good + b"x",
        lambda good, bad: b"#!/bin/sh\n" + good,
        lambda good, bad: good[: len(good) // 2],
        lambda good, bad: b"PK\x03\x04",
        lambda good, bad: b"",
    ],
)
def test_an_archive_that_can_be_read_in_two_ways_is_refused(
    victim: Victim, library: bytes, twist: Callable[[bytes, bytes], bytes]
) -> None:
    lay(victim, twist(package({"model/a": b"good"}), package({"model/a": library})))
    victim.refused(native_key(), "malformed", "model.pt2")


def test_an_archive_with_the_large_form_of_directory_is_taken(victim: Victim, library: bytes) -> None:
    # As torch's own writer makes it, whatever the size.
    plain = package({"model/a": library})
    count, size, offset = struct.unpack_from("<HII", plain, len(plain) - 12)
    end = len(plain) - 22
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    lay(victim, plain[:end] + record + locator + plain[end:])
    victim.admitted(native_key())


def test_data_holds_no_archive_at_all(victim: Victim, engine: bytes) -> None:
    victim.lay_entry(data_key(), {"model.bin": engine, "model.xml": b"<net/>"})
    victim.refused(data_key(), "malformed", "model.bin is a program or an archive")
