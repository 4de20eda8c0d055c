"""``fse/manifest.json`` as typed records, read strictly and written to the same bytes; its chapters are those of docs/format.md.

Everything that names the source is enough to tell it from another, and what `fse_convert.restoration` needs to give it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from fse_convert.checkpoint.encoding import encode_json, sha256
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.names import CONFIG, MANIFEST
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure

FORMAT = "fse-convert"
FORMAT_VERSION = 1
DIGEST = "manifest_sha256"
"""The last key: SHA-256 of the manifest without it, encoded as the manifest is."""
NOT_ASKED = {"status": "not-run", "reason": "not asked for"}

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One JSON object of the manifest: these keys, in this order, and no others."""


class Tool(Record, frozen=True, kw_only=True):
    """The program that wrote the output."""

    name: str
    version: str


class Arguments(Record, frozen=True, kw_only=True):
    """The arguments of the conversion that decide about bytes."""

    target: str
    experts: str
    tp: Positive
    allow_unfused: bool


class ContractRecord(Record, frozen=True, kw_only=True):
    """The kernel contract that the widths meet."""

    name: str
    width_multiple: Natural
    hidden_multiple: Natural


class Layout(Record, frozen=True, kw_only=True):
    """The kernel layout of ``fse/``."""

    name: str
    version: Natural
    mma_types: list[str]


class Widths(Record, frozen=True, kw_only=True):
    """Width of one expert: in the source, in the output's standard layout (``main``), in the kernel layout."""

    source: Natural
    main: Natural
    kernel: Natural


class Model(Record, frozen=True, kw_only=True):
    """The model that was converted."""

    family: str
    model_type: str
    n_shared_experts: Natural
    width: Widths


class ConfigEdit(Record, frozen=True, kw_only=True, rename={"old": "from", "new": "to"}):
    """One integer of config.json that changes; ``section`` is empty for the top level."""

    section: str
    key: str
    old: Natural
    new: Natural


class Reason(Record, frozen=True, kw_only=True):
    """Why a layer does not fit, or a server does not fuse it."""

    code: str
    message: str


class RoutedExperts(Record, frozen=True, kw_only=True):
    """Number and storage format of a layer's routed experts."""

    count: Natural
    format: str


class SharedExpert(Record, frozen=True, kw_only=True):
    """Width and storage format of a layer's shared MLP."""

    width: Natural
    format: str


class Layer(Record, frozen=True, kw_only=True):
    """One MoE layer and its verdict against the kernel contract."""

    name: str
    kind: str
    verdict: str
    reasons: list[Reason]
    routed: RoutedExperts | None
    shared: SharedExpert | None


class Server(Record, frozen=True, kw_only=True):
    """What the server that was converted for makes of the output's standard layout, layer by layer."""

    target: str
    engine: str
    release: str
    verdict: str
    reasons: list[Reason]
    layers: dict[str, str]


class SourceShard(Record, frozen=True, kw_only=True):
    """Size in bytes of one shard of the source, and SHA-256 of its header."""

    size: Natural
    header_sha256: str


class SourceIdentity(Record, frozen=True, kw_only=True):
    """What tells the source from another: SHA-256 of config and index, and its shards.

    ``originals``: text of the config, index and headers that `fse_convert.sidecar.originals` cannot derive from the output.
    """

    files: dict[str, str]
    shards: dict[str, SourceShard]
    originals: dict[str, str]


class ProofRecord(Record, frozen=True, kw_only=True):
    """What was proved when the output was written, by level; `fse_convert.verification` knows what each can hold."""

    storage: dict[str, Any]
    numerics: dict[str, Any]
    kernel: dict[str, Any]


class FileDigest(Record, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 of one file."""

    size: Natural
    sha256: str


class Manifest(Record, frozen=True, kw_only=True):
    """What an output is.

    ``padded``: the source's shape of every tensor that was padded. ``files``: every file but the manifest; ``tensors``:
    XXH3-128 of every tensor, as hex; both None when the output was written without proof.
    """

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    tool: Tool
    arguments: Arguments
    contract: ContractRecord
    layout: Layout
    model: Model
    config_edits: list[ConfigEdit]
    layers: list[Layer]
    server: Server | None
    padded: dict[str, list[Natural]]
    source: SourceIdentity
    proof: ProofRecord
    files: dict[str, FileDigest] | None
    tensors: dict[str, str] | None
    manifest_sha256: str = ""

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by layer name."""
        return {layer.name: layer.verdict for layer in self.layers}

    @property
    def edits(self) -> list[tuple[str, str, int]]:
        """Edits of config.json as (section, key, old value), for undoing them."""
        return [(e.section, e.key, e.old) for e in self.config_edits]

    def value(self) -> dict[str, Any]:
        """Return the manifest as JSON values, keys in the order in which they are written."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value


def sealed(manifest: Manifest) -> bytes:
    """Encode a manifest with its own digest."""
    value = manifest.value()
    return encode_json({**value, DIGEST: own_digest(value)})


def own_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest, its own digest left out."""
    return sha256(encode_json({k: v for k, v in value.items() if k != DIGEST}))


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of an output.

    Raises InvalidCheckpoint when the folder is not an output of this tool or one of a newer version, VerificationFailure
    when its manifest is damaged: not the bytes that were written.
    """
    if MANIFEST not in folder.files:
        what = "a folder without config.json" if CONFIG not in folder.files else "a checkpoint, not an output of fse-convert"
        hint = "give the folder that fse-convert wrote"
        raise InvalidCheckpoint(Problem("not-an-output", f"no {MANIFEST}: this is {what}", folder.label, hint))
    raw = folder.read(MANIFEST)
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise _damaged(f"not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise _damaged(f"a JSON {type(value).__name__}, expected an object")
    _check_intact(value, raw)
    try:
        manifest = msgspec.convert(value, Manifest)
    except msgspec.ValidationError as e:
        raise _damaged(f"not as this version writes it: {e}") from e
    if (manifest.files is None) != (manifest.tensors is None):
        raise _damaged("not as this version writes it: files and tensors are not both null or both there")
    return manifest


def _check_intact(value: dict[str, Any], raw: bytes) -> None:
    version = value.get("format_version")
    stated = value.get(DIGEST)
    intact = encode_json(value) == raw and own_digest(value) == stated and value.get("format") == FORMAT
    if intact and type(version) is int and version > FORMAT_VERSION:  # JSON's true and 1.0 equal 1
        message = f"format version {version}, this fse-convert knows up to {FORMAT_VERSION}"
        raise InvalidCheckpoint(Problem("format-newer", message, MANIFEST, "use the fse-convert that wrote it, or a newer one"))
    if not intact or type(version) is not int or version != FORMAT_VERSION:
        raise _damaged(f"it is not as it was written: {DIGEST} states {stated}, its bytes give {own_digest(value)}")


def _damaged(message: str) -> VerificationFailure:
    return VerificationFailure(Problem("manifest-damaged", message, MANIFEST, "fetch the output again, or convert again"))
