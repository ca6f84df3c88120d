"""Reading JSON that somebody else wrote: records, recipes and verdicts of a repo."""

from __future__ import annotations

from aitune_hf.cache.canonical import MAX_DEPTH, MAX_JSON_BYTES, parse_json
from aitune_hf.errors import CorruptEntryError

__all__ = ["MAX_UNTRUSTED_NODES", "read_untrusted_json"]

#: Values, keys included, in one document of a repo.
MAX_UNTRUSTED_NODES = 200_000


def read_untrusted_json(
    data: bytes,
    what: str,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    max_depth: int = MAX_DEPTH,
    max_nodes: int = MAX_UNTRUSTED_NODES,
) -> object:
    """The value of a JSON document, with every bound checked before it is taken apart.

    Args:
        data: the document.
        what: its name, for messages.
        max_bytes: bytes of text.
        max_depth: levels of lists and objects.
        max_nodes: values, keys included.

    Raises:
        CorruptEntryError: for a document beyond a bound, a key that appears twice in an object, a number that is not
            finite, half of a surrogate pair, or anything that is not JSON in UTF-8.
    """
    try:
        return parse_json(data, max_bytes=max_bytes, max_depth=max_depth, max_nodes=max_nodes)
    except CorruptEntryError as error:
        raise CorruptEntryError(f"{what}: {error}") from error
