"""Why an entry of somebody else's cache is not let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aitune_hf.errors import AITuneError

__all__ = ["Limits", "Objection", "RefusalKind"]

#: ``untrusted``: native, and the user did not say that its source may run code here. ``damaged``: bytes are not those
#: promised. ``malformed``: something no honest publisher writes. ``foreign``: in order, but not what was asked for.
#: ``crashed``: its first load in a child process failed, now or earlier.
RefusalKind = Literal["untrusted", "damaged", "malformed", "foreign", "crashed"]

_GIB = 1 << 30


class Objection(AITuneError):
    """An entry is refused: ``kind`` to count by, ``reason`` a sentence that names the file."""

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: RefusalKind = kind
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How large what comes from others may be, before anything is copied or taken apart.

    Attributes:
        file_bytes: of one file of an entry.
        total_bytes: of all files of an entry.
        members: files within one archive.
        unpacked_bytes: of all files within one archive.
        document_bytes: of an OpenVINO IR without its weights, or of the header of a safetensors file.
        fields: of an ONNX graph, or elements of an OpenVINO IR.
    """

    file_bytes: int = 8 * _GIB
    total_bytes: int = 16 * _GIB
    members: int = 4096
    unpacked_bytes: int = 8 * _GIB
    document_bytes: int = 256 << 20
    fields: int = 4_000_000
