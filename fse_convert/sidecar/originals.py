"""Derives the source's config, index and headers (docs/format.md, "manifest.json", ``source``) from those of the output.

The edits are undone and the result is encoded in the usual ways; the manifest has the digest of every original, which tells
whether a candidate is it. Where none is (an index in another order, a config with tabs) the manifest keeps the text itself, so
that `fse_convert.restoration` is exact in any case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fse_convert.checkpoint.encoding import encode_header, header_entries, sha256


def pick(candidates: Iterable[bytes], digest: str) -> bytes | None:
    """Return the candidate with this SHA-256 (hex), None if there is none."""
    return next((c for c in candidates if sha256(c) == digest), None)


def config_candidates(converted: Mapping[str, Any], edits: Iterable[tuple[str, str, int | list[int]]]) -> Iterator[bytes]:
    """Undo ``edits`` (section, key, old value) in a parsed config.json, and encode it in the usual ways.

    Yields nothing where a section is missing: then it is not the config that was converted.
    """
    config = json.loads(json.dumps(converted))
    for section, key, old in edits:
        place = config.get(section) if section else config
        if not isinstance(place, dict):
            return
        place[key] = old
    yield from _encodings(config)


def index_candidates(converted: Mapping[str, Any], total_size: int, added: int) -> Iterator[bytes]:
    """Put the source's totals into a parsed index, and encode it in the usual ways; yield nothing where it has none.

    ``total_size``: bytes of the source's tensors. ``added``: elements that padding added, for ``total_parameters``.
    """
    metadata = converted.get("metadata")
    if not isinstance(metadata, dict):
        return
    metadata = {**metadata, "total_size": total_size}
    if isinstance(metadata.get("total_parameters"), int):
        metadata["total_parameters"] -= added
    yield from _encodings({**converted, "metadata": metadata})


def header_candidates(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Encode a shard's header, its length in front, from (name, dtype, shape) in offset order.

    ``metadata`` is the output's, to which ``format: pt`` may have been added.
    """
    entries = header_entries(tensors)
    bare = {k: v for k, v in metadata.items() if k != "format"}
    for candidate in (metadata, None, bare):
        yield encode_header(entries, candidate)


def _encodings(value: Any) -> Iterator[bytes]:
    for ascii_only in (False, True):
        for indent in (2, 4):
            raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "backslashreplace")
            yield raw + b"\n"
            yield raw
