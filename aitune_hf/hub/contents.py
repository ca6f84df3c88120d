"""What may lie in the files of a foreign entry, by their kind. Nothing here loads, imports or unpacks a file."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from xml.parsers import expat

from aitune_hf.cache.canonical import MAX_JSON_BYTES
from aitune_hf.errors import CorruptEntryError
from aitune_hf.hub.archive import ZIP_MAGIC, check_archive
from aitune_hf.hub.objection import Limits, Objection
from aitune_hf.hub.onnx_references import check_onnx
from aitune_hf.hub.untrusted_json import read_untrusted_json

__all__ = ["DATA_SUFFIXES", "check_contents", "check_data_names"]

#: Files that a data entry may hold.
DATA_SUFFIXES = (".bin", ".data", ".json", ".onnx", ".safetensors", ".xml")

#: Raw numbers: which file must be there to give them a meaning.
_COMPANIONS: Mapping[str, str] = {".bin": ".xml", ".data": ".onnx"}
_EXECUTABLE = (b"\x7fELF", b"MZ\x90\x00", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe", ZIP_MAGIC)
_MAX_XML_DEPTH = 64


def check_data_names(names: Iterable[str]) -> None:
    """Raise ``Objection`` unless an entry with these files can be data."""
    suffixes = {name: Path(name).suffix for name in names}
    for name, suffix in suffixes.items():
        if suffix not in DATA_SUFFIXES:
            raise Objection("malformed", f"{name}: an entry of data holds only {', '.join(DATA_SUFFIXES)} files")
        companion = _COMPANIONS.get(suffix)
        if companion is not None and companion not in suffixes.values():
            raise Objection("malformed", f"{name}: an entry with a {suffix} file has one in {companion} too")


def check_contents(folder: Path, names: Iterable[str], limits: Limits, *, is_data: bool) -> None:
    """Check every file of an entry, in a folder that nobody else writes to.

    Raises ``Objection`` for archives that are unsafe to unpack, and in data for files that are not what their name
    says, refer to files outside of the entry, or are larger than ``limits``.
    """
    for name in names:
        path = folder / name
        with path.open("rb") as file:
            magic = file.read(4)
        if is_data:
            if magic in _EXECUTABLE:
                raise Objection("malformed", f"{name} is a program or an archive, not data")
            if check := _CHECKS.get(path.suffix):
                check(path, limits)
        elif magic == ZIP_MAGIC or path.suffix in {".pt2", ".zip"}:
            check_archive(path, limits)


def _check_json(path: Path, limits: Limits) -> None:
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    try:
        read_untrusted_json(data, path.name)
    except CorruptEntryError as error:
        raise Objection("malformed", str(error)) from error


def _check_onnx(path: Path, limits: Limits) -> None:
    if path.stat().st_size == 0:
        raise Objection("malformed", f"{path.name} is no ONNX model: it is empty")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
    ):
        check_onnx(data, path.name, limits.fields)


def _check_safetensors(path: Path, limits: Limits) -> None:
    name, size = path.name, path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(limits.document_bytes, MAX_JSON_BYTES, size - 8):
            raise Objection("malformed", f"{name} is no safetensors file: its header does not fit, or is too long")
        text = file.read(length)
    try:
        header = read_untrusted_json(text.rstrip(b" "), f"{name}, header")
    except CorruptEntryError as error:
        raise Objection("malformed", f"{error}: {name} is no safetensors file") from error
    if not isinstance(header, dict):
        raise Objection("malformed", f"{name} is no safetensors file: its header is no object")
    for tensor, entry in header.items():
        if tensor != "__metadata__" and not _lies_within(entry, size - 8 - length):
            raise Objection("malformed", f"{name}: tensor {tensor[:80]!r} does not lie within the file")


def _lies_within(entry: object, size: int) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return False
    offsets = entry["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        return False
    return bool(0 <= offsets[0] <= offsets[1] <= size)


class _IrCheck:
    """Follows the elements of an OpenVINO IR."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._depth = 0
        self._elements = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        self._elements += 1
        if self._depth == 1 and tag != "net":
            raise Objection("malformed", f"{self._name} is no OpenVINO IR: its root is {tag[:40]!r}")
        if self._depth > _MAX_XML_DEPTH or self._elements > self._limits.fields:
            raise Objection("malformed", f"{self._name} is nested too deep, or has too many elements")
        # By this note, OpenVINO may read weights again from the file it names.
        if "weights_path" in tag or any("weights_path" in text for pair in attributes.items() for text in pair):
            raise Objection("malformed", f"{self._name} names a file with weights of its own choice")

    def end(self, tag: str) -> None:
        self._depth -= 1

    def refuse_types(self, *_: object) -> None:
        raise Objection("malformed", f"{self._name} declares a document type, which an OpenVINO IR never does")


def _check_xml(path: Path, limits: Limits) -> None:
    if path.stat().st_size > limits.document_bytes:
        raise Objection("malformed", f"{path.name} has more than {limits.document_bytes} bytes")
    watch = _IrCheck(path.name, limits)
    # Told the encoding, it does not follow a byte order mark or a declaration to another one.
    parser = expat.ParserCreate(encoding="utf-8")
    parser.StartElementHandler = watch.start
    parser.EndElementHandler = watch.end
    parser.StartDoctypeDeclHandler = watch.refuse_types
    try:
        with path.open("rb") as file:
            parser.ParseFile(file)
    except expat.ExpatError as error:
        raise Objection("malformed", f"{path.name} is no OpenVINO IR: {error}") from error


_CHECKS: Mapping[str, Callable[[Path, Limits], None]] = {
    ".json": _check_json,
    ".onnx": _check_onnx,
    ".safetensors": _check_safetensors,
    ".xml": _check_xml,
}
