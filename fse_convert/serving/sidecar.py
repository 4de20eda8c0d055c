"""``OUT/fse`` for servers: the shared experts in kernel layout, and what a loader must check before it uses them.

`open_sidecar` compares the manifest with itself, with the files around it, and with the headers of ``fse/``. config.json and
the index are read whole, since they decide what a server loads; of shards only names and sizes are looked at, and the bytes of
a tensor are checked when it is read. No torch is imported until then. The checks are those of docs/format.md, "What a loader
must check".
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import TensorInfo
from fse_convert.checkpoint.left_out import find_clutter
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, SIDECAR, SUFFIX
from fse_convert.errors import FseConvertError, NotServable, Problem, counted, some
from fse_convert.output.digests import file_sha256
from fse_convert.servers.targets import Contract
from fse_convert.sidecar.manifest import FETCH_AGAIN, FORMAT, FORMAT_VERSION, FileDigest, Manifest, check_digest, json_object, typed
from fse_convert.sidecar.reader import SidecarContents, read_sidecar
from fse_convert.sidecar.tensors import LAYOUT, LAYOUT_VERSION, KernelTensorName, kernel_shapes, shard_metadata

if TYPE_CHECKING:
    from torch import Tensor

RECONVERT = "convert the original checkpoint again: fse-convert CHECKPOINT OUT"
UPGRADE = "install the fse-convert that wrote it, or a later one"
UNPROVED = (
    "%s was written with --verify none: its manifest has no digests, so neither config.json nor the shared experts' bytes were "
    "compared with what the conversion wrote"
)
"""For the loaders' logs; see `Sidecar.proved`."""
DOWN = re.compile(r"(.+)\.shared_experts?\.(?:.+\.)?(?:w2|down_proj)\.[^.]+")
"""A tensor of a shared expert's down projection in the standard layout, and the prefix of its layer."""
DECISIVE = {
    CONFIG: "put the written one back; to change a config leave the file alone: vLLM --hf-overrides, SGLang "
    "--json-model-override-args; or convert the changed checkpoint again",
    INDEX: f"put the written one back, or {RECONVERT}",
}
"""The files that decide what a server loads, and what to do when they are not those that the conversion wrote."""


class KernelShared(NamedTuple):
    """The shared experts of one layer as the kernel takes them; ``S`` is the width of all of them together.

    ``l1_weight`` F8_E4M3 ``[2S, H]``; ``l1_scale`` int32 ``[2S, H / 128]``, strides ``(1, 2S)``; ``l2_weight`` F8_E4M3
    ``[H, S]``; ``l2_scale`` int32 ``[H, S / 128]``, strides ``(1, H)``. On the CPU, and possibly mapped from the file: copy, do
    not keep. Names, dtypes, shapes and strides: vLLM 0.33 model_executor/layers/fused_moe/deep_gemm_mega_moe.py:410-448.
    """

    l1_weight: Tensor
    l1_scale: Tensor
    l2_weight: Tensor
    l2_scale: Tensor


@dataclass(frozen=True)
class Sidecar:
    """An opened ``OUT/fse``; see `open_sidecar`.

    ``folder``: OUT. ``layers``: prefixes as in the checkpoint, such as ``layers.3.ffn.experts``, in file order. ``hidden``: the
    hidden size; 0 when no layer is in kernel layout.
    """

    folder: Path
    manifest: Manifest
    layers: tuple[str, ...]
    hidden: int
    _places: Mapping[str, TensorInfo] = field(repr=False)
    _handles: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """Width of all shared experts of a layer together, in kernel layout."""
        return self.manifest.model.shared_kernel_width

    @property
    def proved(self) -> bool:
        """Whether the manifest has digests to compare files and tensors with; if not, a loader logs `UNPROVED`."""
        return self.manifest.files is not None and self.manifest.tensors is not None

    def tensors(self, prefix: str) -> KernelShared:
        """Read the four tensors of a layer; see `tensor`."""
        return KernelShared(*(self.tensor(prefix, part) for part in KernelTensorName))

    def tensor(self, prefix: str, part: KernelTensorName) -> Tensor:
        """Read one tensor of a layer, as the kernel takes it. Raises NotServable when it is not there, or not as it was written."""
        name = f"{prefix}.{part.value}"
        if name not in self._places:
            refuse("sidecar-layer", f"no shared experts of {prefix} in kernel layout", self.folder / SIDECAR, RECONVERT)
        shard = self._places[name].shard
        stored = self._stored(shard, name)
        if self.manifest.tensors is not None and (actual := xxh3_128(stored)) != (digest := self.manifest.tensors.get(name)):
            message = f"{name} is not as it was written: its XXH3-128 is {actual}, in the manifest {digest}"
            hint = f"fse-convert verify OUT says what else is damaged; {FETCH_AGAIN}"
            refuse("sidecar-damaged", message, self.folder / shard, hint)
        return stored.t() if part.is_scale else stored

    def check_original(self, prefix: str) -> None:
        """Refuse a sidecar beside the shards of another checkpoint of the same shapes, or beside shards that changed.

        Config and index do not tell such checkpoints apart, so a layer's down projections are read out of the shards: a third
        of the bytes of its shared experts. Raises NotServable.
        """
        from safetensors import SafetensorError

        for name, digest in self._down_projections.get(prefix, {}).items():
            shard = self._standard_shards.get(name, self._single_shard)
            if not (self.folder / shard).is_file():
                continue  # the server has not fetched it yet, and will fetch that of the revision of fse/
            try:
                actual = xxh3_128(self._stored(shard, name))
            except SafetensorError as e:  # a shard of the same size that has other tensors, or none
                actual = str(e)
            if actual != digest:
                message = f"{name} is not what the conversion wrote: fse/ is of another checkpoint, or the shard has changed"
                refuse("sidecar-stale", message, self.folder / shard, RECONVERT)

    @cached_property
    def _down_projections(self) -> Mapping[str, dict[str, str]]:
        """Digests of the shared experts' down projections in the standard layout, by prefix in ``fse/`` and by name."""
        digests: dict[str, dict[str, str]] = {prefix: {} for prefix in self.layers}
        for name, digest in (self.manifest.tensors or {}).items():
            if match := DOWN.fullmatch(name):
                digests.get(f"{match[1]}.experts", {})[name] = digest
        return digests

    @cached_property
    def _standard_shards(self) -> Mapping[str, str]:
        """Shard by tensor name in the standard layout; empty where there is no index."""
        index = self.folder / INDEX
        weight_map = _json(index).get("weight_map") if index.is_file() else None
        return weight_map if isinstance(weight_map, dict) else {}

    @cached_property
    def _single_shard(self) -> str:
        """The shard of a checkpoint without an index."""
        return next((path.name for path in self.folder.glob(f"*{SUFFIX}")), "") if not self._standard_shards else ""

    def _stored(self, shard: str, name: str) -> Tensor:
        from safetensors import safe_open

        if shard not in self._handles:
            self._handles[shard] = safe_open(self.folder / shard, framework="pt")
        tensor: Tensor = self._handles[shard].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Forget the open shards; tensors that were read stay valid."""
        self._handles.clear()

    def check(self, *, hidden: int, routed_width: int, n_shared: int, contract: Contract, target: str = "") -> None:
        """Refuse, with every reason, what the server's model cannot run fused.

        ``routed_width``: of one routed expert as the kernel is called with it, the server's own padding included.
        ``contract``: of the server's kernel. ``target``: what to convert for instead; the contract unless given.
        Raises NotServable.
        """
        where, width, target = self.folder / SIDECAR, self.manifest.model.width, target or contract.name
        if not self.layers:
            hint = f"see why: fse-convert inspect CHECKPOINT --target {target}"
            refuse("sidecar-empty", "no layer's shared experts are in kernel layout", where, hint)
        problems = []

        def wrong(code: str, message: str, hint: str) -> None:
            problems.append(Problem(code, message, str(where), hint))

        if hidden != self.hidden:
            wrong("hidden-mismatch", f"hidden size is {self.hidden}, the model's is {hidden}", RECONVERT)
        if n_shared != (held := self.manifest.model.n_shared_experts):
            wrong("shared-count-mismatch", f"holds {held} shared experts per layer, the model has {n_shared}", RECONVERT)
        hint = f"convert the original checkpoint for this server: fse-convert CHECKPOINT OUT --target {target}"
        if width.kernel % contract.width_multiple or self.hidden % contract.hidden_multiple:
            message = (
                f"made for {self.manifest.contract_name}: width {width.kernel} and hidden size {self.hidden}; the server's kernel "
                f"({contract.name}) takes multiples of {contract.width_multiple} and {contract.hidden_multiple}"
            )
            wrong("contract-mismatch", message, hint)
        if width.kernel != routed_width:
            message = (
                f"shared experts are {width.kernel} wide, this server's routed experts {routed_width}: the kernel takes one width"
            )
            if width.main != width.kernel:
                hint += f"; or without --experts {self.manifest.arguments.experts}"
            wrong("width-mismatch", message, hint)
        _refuse_all(problems)


def open_sidecar(folder: Path | str, *, whole: bool = True, otherwise: str = "") -> Sidecar:
    """Open the sidecar of a converted checkpoint and check it against itself and the folder; ``folder`` is OUT.

    ``whole``: OUT has all of its shards, and nobody else's; from the hub a server fetches shards later, and only some of them.
    ``otherwise``: how to serve without the sidecar, for every hint. Raises NotServable for a folder that fse-convert did not
    write, for a format or layout that this release does not know, and for files that are missing, incomplete or not those that
    were written.
    """
    try:
        return _open(Path(folder), whole=whole)
    except FseConvertError as e:
        raise NotServable(*(replace(p, hint="; ".join(filter(None, (p.hint, otherwise)))) for p in e.problems)) from e


def locate(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Return the folder of a model; for a name on the Hugging Face Hub, its snapshot with ``fse/`` and the decisive files.

    Raises what huggingface_hub raises; offline it looks in the cache only.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, cache_dir=cache, allow_patterns=[f"{SIDECAR}/*", CONFIG, INDEX]))


def refuse(code: str, message: str, where: Path | str, hint: str = "") -> NoReturn:
    """Raise NotServable with one problem."""
    raise NotServable(Problem(code, message, str(where), hint))


def _refuse_all(problems: Iterable[Problem]) -> None:
    if listed := list(problems):
        raise NotServable(*listed)


def _open(folder: Path, *, whole: bool) -> Sidecar:
    manifest = _manifest(folder)
    if manifest.files is not None:
        _refuse_all(_file_problems(folder, manifest.files, whole=whole))
    contents = read_sidecar(_ServedFolder(folder))
    _refuse_all(replace(p, where=str(folder / p.where)) for p in contents.problems)
    _refuse_all(_layout_problems(folder, manifest, contents))
    tensors, layers = contents.tensors, contents.layers
    hidden = _check_shapes(folder, tensors, layers, manifest.model.shared_kernel_width)
    return Sidecar(folder=folder, manifest=manifest, layers=layers, hidden=hidden, _places=tensors)


class _ServedFolder(LocalFolder):
    """OUT as far as the reader needs it: folders that a user keeps beside ``fse/`` need not be readable to the server."""

    @cached_property
    def files(self) -> dict[str, int]:
        """Size of the files in ``fse/``, by name."""
        return {f"{SIDECAR}/{path.name}": path.stat().st_size for path in self.path(SIDECAR).iterdir() if path.is_file()}


def _manifest(folder: Path) -> Manifest:
    """Read the manifest, in any encoding of its JSON. Raises NotServable."""
    path = folder / MANIFEST
    if not path.is_file():
        refuse("sidecar-missing", f"no {MANIFEST}: this folder was not written by fse-convert", folder, RECONVERT)
    value = _json(path)
    if value.get("format") != FORMAT:
        refuse("manifest-invalid", f"format is {value.get('format')!r}, not {FORMAT!r}", path, RECONVERT)
    if value.get("format_version") not in range(1, FORMAT_VERSION + 1):
        message = f"format version {value.get('format_version')!r}, this release knows up to {FORMAT_VERSION}"
        refuse("manifest-version", message, path, UPGRADE)
    try:
        check_digest(value)
    except ValueError as e:
        refuse("manifest-damaged", str(e), path, FETCH_AGAIN)
    try:
        manifest = typed(value)
    except ValueError as e:
        refuse("manifest-invalid", str(e), path, RECONVERT)
    layout = manifest.layout
    if layout and (layout.name, layout.version) != (LAYOUT, LAYOUT_VERSION):
        message = f"kernel layout {layout.name!r} version {layout.version}, this release knows {LAYOUT!r} version {LAYOUT_VERSION}"
        refuse("layout-unknown", message, path, UPGRADE)
    return manifest


def _json(path: Path) -> dict[str, Any]:
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as e:
        refuse("manifest-invalid", str(e), path, RECONVERT)


def _file_problems(folder: Path, files: Mapping[str, FileDigest], *, whole: bool) -> Iterator[Problem]:
    """Compare the folder's files with those that the conversion wrote, as the manifest lists them.

    With config.json or the index of another conversion, or an edited one, another model would be loaded.
    """
    for name in dict.fromkeys((*DECISIVE, *files)):
        path, written = folder / name, files.get(name)
        is_shard = name.endswith(SUFFIX)
        if not path.is_file():
            if written and (name.startswith(f"{SIDECAR}/") or (whole and name in DECISIVE)):
                yield Problem("sidecar-incomplete", "the conversion wrote this file, the folder has none", str(path), FETCH_AGAIN)
            elif written and whole and is_shard and "/" not in name:
                yield Problem("shard-missing", "the conversion wrote this shard, the folder has none", str(path), FETCH_AGAIN)
        elif written is None:
            yield Problem("sidecar-stale", "the conversion wrote no such file", str(path), RECONVERT)
        elif name in DECISIVE and (actual := file_sha256(path)) != written.sha256:
            message = f"is not the file that the conversion wrote: its SHA-256 is {actual}, in the manifest {written.sha256}"
            yield Problem("sidecar-stale", message, str(path), DECISIVE[name])
        elif is_shard and (size := path.stat().st_size) != written.size:
            yield Problem("sidecar-stale", f"has {size} bytes, the conversion wrote {written.size}", str(path), RECONVERT)
    for path in sorted(folder.glob(f"*{SUFFIX}")) if whole else ():
        if path.name not in files and not find_clutter(
            path.name
        ):  # without an index, servers read every shard (vllm-project/vllm#54230)
            yield Problem("shard-unlisted", "the conversion did not write this shard", str(path), "move it out of the folder")


def _layout_problems(folder: Path, manifest: Manifest, contents: SidecarContents) -> Iterator[Problem]:
    """Compare the shards' metadata and layers with the manifest's: four tensors for every layer that is fused, no others."""
    expected = shard_metadata(manifest.contract_name)
    for shard in contents.shards:
        metadata = {key: shard.header.metadata.get(key) for key in expected}
        if metadata != expected:
            message = f"its metadata is {metadata}, by the manifest {expected}"
            yield Problem("layout-unknown", message, str(folder / shard.name), RECONVERT)
    listed, held = set(manifest.kernel_prefixes), set(contents.layers)
    for names, what in ((listed - held, "lacks"), (held - listed, "has, beyond those of the manifest,")):
        if names:
            message = f"{what} {counted(len(names), 'layer')} in kernel layout: {some(sorted(names))}"
            yield Problem("sidecar-incomplete", message, str(folder / SIDECAR), FETCH_AGAIN)


def _check_shapes(folder: Path, tensors: Mapping[str, TensorInfo], layers: Iterable[str], width: int) -> int:
    """Refuse a layer that lacks a tensor, or has one of another shape than the manifest's width gives; return the hidden size."""
    hidden = 0
    for prefix in layers:
        l1 = tensors.get(f"{prefix}.{KernelTensorName.L1_WEIGHT.value}")
        hidden = hidden or (l1.shape[-1] if l1 and l1.shape else 0)
        for part, (dtype, shape) in kernel_shapes(hidden, width).items():
            info = tensors.get(f"{prefix}.{part.value}")
            if info is None or (info.dtype, info.shape) != (dtype, shape):
                actual = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                message = f"{prefix}.{part.value} {actual}, expected {dtype} {list(shape)}"
                refuse("sidecar-incomplete", message, folder / SIDECAR, RECONVERT)
    return hidden


def xxh3_128(stored: Tensor) -> str:
    """Return the XXH3-128 of the bytes of a contiguous tensor on the CPU, as hex; without numpy and without a copy."""
    import xxhash

    memory = (ctypes.c_char * stored.nbytes).from_address(stored.data_ptr())
    return xxhash.xxh3_128(memory).hexdigest()
