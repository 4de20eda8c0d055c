"""What an output's manifest states, as values: the reading side of `fse_convert.plan.manifest`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.names import CONFIG, MANIFEST
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure
from fse_convert.sidecar.manifest import DIGEST, FORMAT, FORMAT_VERSION, own_digest
from fse_convert.sidecar.typed import natural, text

RESTORE_HINT = "give the folder that fse-convert wrote"


@dataclass(frozen=True, slots=True)
class Claims:
    """A manifest, typed.

    ``target``, ``experts``: the arguments by those names. ``widths`` of one expert: source, main (standard layout), kernel.
    ``edits``: (section, key, old, new) of config.json. ``layers``: verdict by layer name. ``padded``: source shape by tensor
    name. ``files``: size and SHA-256 by name, ``tensors``: XXH3-128 by name; both None when the output was written without
    proof.
    """

    raw: Mapping[str, Any]
    target: str
    experts: str
    contract: str
    n_shared: int
    widths: tuple[int, int, int]
    edits: tuple[tuple[str, str, int, int], ...]
    layers: Mapping[str, str]
    padded: Mapping[str, tuple[int, ...]]
    files: Mapping[str, tuple[int, str]] | None
    tensors: Mapping[str, str] | None

    @property
    def source(self) -> Mapping[str, Any]:
        """The source's identity, and what of it cannot be found again."""
        found: Mapping[str, Any] = self.raw["source"]
        return found

    @property
    def originals(self) -> Mapping[str, str]:
        """Text of the source's config, index and headers that `fse_convert.sidecar.originals` does not find again, by file name."""
        found: Mapping[str, str] = self.source["originals"]
        return found


def read_claims(folder: Folder) -> Claims:
    """Read the manifest of an output.

    Raises InvalidCheckpoint when the folder is no output of this tool or one of a newer version, VerificationFailure
    when its manifest is damaged: not as it was written, byte for byte.
    """
    if MANIFEST not in folder.files:
        what = "a folder without config.json" if CONFIG not in folder.files else "a checkpoint, not an output of fse-convert"
        raise InvalidCheckpoint(Problem("not-an-output", f"no {MANIFEST}: this is {what}", folder.label, RESTORE_HINT))
    raw = folder.read(MANIFEST)
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise _damaged(f"not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise _damaged(f"a JSON {type(value).__name__}, expected an object")
    _check_intact(value, raw)
    try:
        return parse_claims(value)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _damaged(f"not as this version writes it: {type(e).__name__} {e}") from e


def _check_intact(value: dict[str, Any], raw: bytes) -> None:
    version: Any = value.get("format_version")
    stated = value.get(DIGEST)
    intact = encode_json(value) == raw and own_digest(value) == stated and value.get("format") == FORMAT
    intact = intact and type(version) is int  # JSON's true and 1.0 equal 1
    if intact and version > FORMAT_VERSION:
        message = f"format version {version}, this fse-convert knows up to {FORMAT_VERSION}"
        raise InvalidCheckpoint(Problem("format-newer", message, MANIFEST, "use the fse-convert that wrote it, or a newer one"))
    if not intact or version != FORMAT_VERSION:
        raise _damaged(f"it is not as it was written: {DIGEST} states {stated}, its bytes give {own_digest(value)}")


def _damaged(message: str) -> VerificationFailure:
    return VerificationFailure(Problem("manifest-damaged", message, MANIFEST, "fetch the output again, or convert again"))


def parse_claims(value: Mapping[str, Any]) -> Claims:
    """Type a manifest's content; raises KeyError, TypeError, ValueError or AttributeError for any other content."""
    model, width, arguments, source = value["model"], value["model"]["width"], value["arguments"], value["source"]
    files, tensors = value.get("files"), value.get("tensors")
    if (files is None) != (tensors is None):
        raise ValueError("files and tensors are both null or both there")
    if natural(arguments["tp"]) < 1 or type(arguments["allow_unfused"]) is not bool:
        raise ValueError("arguments.tp is a positive integer, arguments.allow_unfused a boolean")
    if CONFIG not in source["files"]:
        raise ValueError(f"source.files has no {CONFIG}")
    for content in [*source["files"].values(), *source["originals"].values()]:
        text(content).encode("utf-8")
    for shard in source["shards"].values():
        natural(shard["size"])
        text(shard["header_sha256"])
    return Claims(
        raw=value,
        target=text(arguments["target"]),
        experts=text(arguments["experts"]),
        contract=text(value["contract"]["name"]),
        n_shared=natural(model["n_shared_experts"]),
        widths=(natural(width["source"]), natural(width["main"]), natural(width["kernel"])),
        edits=tuple((text(e["section"]), text(e["key"]), natural(e["from"]), natural(e["to"])) for e in value["config_edits"]),
        layers={text(layer["name"]): text(layer["verdict"]) for layer in value["layers"]},
        padded={name: tuple(map(natural, shape)) for name, shape in value["padded"].items()},
        files={n: (natural(f["size"]), text(f["sha256"])) for n, f in files.items()} if files is not None else None,
        tensors={n: text(d) for n, d in tensors.items()} if tensors is not None else None,
    )
