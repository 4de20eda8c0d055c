"""``fse/manifest.json`` (docs/format.md, "manifest.json") as typed records, read strictly and written to the same bytes.

What it says of the source is enough to tell that source from another, and for `fse_convert.restoration` to give it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from fse_convert.checkpoint.encoding import encode_json, sha256
from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.names import CONFIG, MANIFEST
from fse_convert.errors import InvalidCheckpoint, Problem, VerificationFailure
from fse_convert.sidecar.tensors import kernel_prefix

FORMAT = "fse-convert"
FORMAT_VERSION = 2
"""The newest version: of outputs without kernel layout, or with changed formats or padded stacks. Others are of version 1."""
DIGEST = "manifest_sha256"
"""The last key: SHA-256 of the manifest without it, encoded as the manifest is."""
FUSED = "fused"
"""Verdict of the layers that have their four tensors in ``fse/``."""
NOT_ASKED = {"status": "not-run", "reason": "not asked for"}
FETCH_AGAIN = "fetch the output again, or convert again"
"""Hint for files that are missing or damaged."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON object of the manifest: these keys, in this order. A reader ignores other keys; verification reports them."""


class Tool(Record, frozen=True, kw_only=True):
    """The program that wrote the output."""

    name: str
    version: str


class Arguments(Record, frozen=True, kw_only=True):
    """The arguments of the conversion that decide about bytes; those about formats only where they were given."""

    target: str
    experts: str
    tp: Positive
    allow_unfused: bool
    routed_fp8: bool | msgspec.UnsetType = msgspec.UNSET
    shared_mxfp4: bool | msgspec.UnsetType = msgspec.UNSET
    heal: bool | msgspec.UnsetType = msgspec.UNSET
    lossy: bool | msgspec.UnsetType = msgspec.UNSET
    drop_originals: bool | msgspec.UnsetType = msgspec.UNSET


CHANGE_ARGUMENTS = ("routed_fp8", "shared_mxfp4", "heal", "lossy", "drop_originals")
"""Arguments about changes of format."""


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


class ExpertWidths(Record, frozen=True, kw_only=True):
    """Width of one expert: in the source, in the output's standard layout (``main``), in the kernel layout."""

    source: Natural
    main: Natural
    kernel: Natural


class Model(Record, frozen=True, kw_only=True):
    """The model that was converted.

    ``shared_width``: of the shared MLP, where that is not the same multiple of the routed width everywhere.
    """

    family: str
    model_type: str
    n_shared_experts: Natural
    width: ExpertWidths
    shared_width: ExpertWidths | msgspec.UnsetType = msgspec.UNSET

    @property
    def shared_source_width(self) -> int:
        """Width of all shared experts of a layer together, in the source."""
        return self.shared_width.source if self.shared_width else self.n_shared_experts * self.width.source

    @property
    def shared_kernel_width(self) -> int:
        """Width of all shared experts of a layer together, in the kernel layout."""
        return self.shared_width.kernel if self.shared_width else self.n_shared_experts * self.width.kernel


class ConfigEdit(Record, frozen=True, kw_only=True, rename={"old": "from", "new": "to"}):
    """One key of config.json that changes: an integer, or a list of them; ``section`` is empty for the top level."""

    section: str
    key: str
    old: Natural | list[Natural]
    new: Natural | list[Natural]


class ChangeRecord(Record, frozen=True, kw_only=True):
    """One change of format that was made."""

    name: str
    lossless: bool


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

    def __post_init__(self) -> None:
        if CONFIG not in self.files:
            raise ValueError(f"`files` lacks {CONFIG}")
        for text in (*self.files.values(), *self.originals.values()):
            text.encode("utf-8")  # half a surrogate pair cannot be written back


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

    ``padded``: the source's shape of every tensor that was padded; ``stretches``: of those with several matrices, in how many
    equal stretches of bytes they grew, where that is not as for one matrix. ``files``: every file but the manifest; ``tensors``:
    XXH3-128 of every tensor, as hex; both None when the output was written without proof.
    """

    format: str = FORMAT
    format_version: int
    tool: Tool
    arguments: Arguments
    contract: ContractRecord | None
    layout: Layout | None
    model: Model
    config_edits: list[ConfigEdit]
    changes: list[ChangeRecord] | msgspec.UnsetType = msgspec.UNSET
    renamed: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    layers: list[Layer]
    server: Server | None
    padded: dict[str, list[Natural]]
    stretches: dict[str, Positive] | msgspec.UnsetType = msgspec.UNSET
    source: SourceIdentity
    proof: ProofRecord
    files: dict[str, FileDigest] | None
    tensors: dict[str, str] | None
    manifest_sha256: str = ""

    @property
    def contract_name(self) -> str:
        """The kernel contract's name; empty where there is no kernel layout."""
        return self.contract.name if self.contract else ""

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by layer name."""
        return {layer.name: layer.verdict for layer in self.layers}

    @property
    def kernel_prefixes(self) -> list[str]:
        """Prefixes of the tensors in ``fse/``, of every layer that has them."""
        return [kernel_prefix(layer.name) for layer in self.layers if layer.verdict == FUSED] if self.contract else []

    @property
    def edits(self) -> list[tuple[str, str, int | list[int]]]:
        """Edits of config.json as (section, key, old value), for undoing them."""
        return [(e.section, e.key, e.old) for e in self.config_edits]

    def value(self) -> dict[str, Any]:
        """Return the manifest as JSON values, keys in the order in which they are written."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value


def stretches(source: Sequence[int], shape: Sequence[int]) -> int:
    """Return in how many stretches of bytes a tensor grew that holds one matrix: at its end by rows, or every row by columns.

    Raises ValueError for shapes that no padding leads to.
    """
    grown = [i for i, (old, new) in enumerate(zip(source, shape, strict=False)) if old != new]
    if len(source) != len(shape) or len(grown) > 1 or any(source[i] > shape[i] for i in grown):
        raise ValueError(f"{list(shape)} cannot hold the original {list(source)}")
    return 1 if grown in ([], [0]) else source[0]


def sealed(manifest: Manifest) -> bytes:
    """Encode a manifest with its own digest."""
    value = manifest.value()
    return encode_json({**value, DIGEST: own_digest(value)})


def own_digest(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest, its own digest left out."""
    return sha256(encode_json({k: v for k, v in value.items() if k != DIGEST}))


def read_manifest(folder: Folder) -> Manifest:
    """Read the manifest of an output; see `read_value` for the errors."""
    return checked(read_value(folder))


def read_value(folder: Folder) -> dict[str, Any]:
    """Read the manifest of an output as JSON values, exactly as they were written.

    Raises InvalidCheckpoint when the folder is not an output of this tool or one of a newer version, VerificationFailure
    when its manifest is damaged: not the bytes that were written.
    """
    if MANIFEST not in folder.files:
        what = "a folder without config.json" if CONFIG not in folder.files else "a checkpoint, not an output of fse-convert"
        hint = "give the folder that fse-convert wrote"
        raise InvalidCheckpoint(Problem("not-an-output", f"no {MANIFEST}: this is {what}", folder.label, hint))
    raw = folder.read(MANIFEST)
    try:
        value = json_object(raw)
        check_digest(value)
    except ValueError as e:
        raise damaged_manifest(str(e)) from e
    if encode_json(value) != raw or value.get("format") != FORMAT:
        raise damaged_manifest("it is not as it was written, though its digest fits")
    version = value.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        message = f"format version {version}, this fse-convert knows up to {FORMAT_VERSION}"
        raise InvalidCheckpoint(Problem("format-newer", message, MANIFEST, "use the fse-convert that wrote it, or a newer one"))
    if type(version) is not int or version < 1:  # JSON's true and 1.0 equal 1
        raise damaged_manifest(f"format version {version!r}, expected 1 to {FORMAT_VERSION}")
    return value


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")  # noqa: TRY004
    return value


def check_digest(value: Mapping[str, Any]) -> None:
    """Compare a manifest with its own digest. Raises ValueError."""
    try:
        actual = own_digest(value)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it cannot be encoded again: {e}") from e
    if value.get(DIGEST) != actual:
        raise ValueError(f"it is not as it was written: {DIGEST} is {value.get(DIGEST)!r:.80}, its content gives {actual}")


def typed(value: Mapping[str, Any]) -> Manifest:
    """Type the JSON values of a manifest. Raises ValueError, which names the JSON path."""
    try:
        return msgspec.convert(value, Manifest)
    except (msgspec.ValidationError, UnicodeEncodeError) as e:  # the latter for a key with half a surrogate pair
        raise ValueError(f"not as this version writes it: {e}") from e


def checked(value: Mapping[str, Any]) -> Manifest:
    """Type JSON values, and check that they have digests of files and tensors, or neither: servers take what there is.

    Raises VerificationFailure.
    """
    try:
        manifest = typed(value)
    except ValueError as e:
        raise damaged_manifest(str(e)) from e
    if (manifest.files is None) != (manifest.tensors is None):
        raise damaged_manifest("not as this version writes it: `files` and `tensors` are not both null or both there")
    return manifest


def damaged_manifest(message: str) -> VerificationFailure:
    """Return the error for a manifest that is not as it was written."""
    return VerificationFailure(Problem("manifest-damaged", message, MANIFEST, FETCH_AGAIN))
