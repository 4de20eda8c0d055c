"""Reads ``OUT/fse``: the shared experts in kernel layout, for the loaders of servers.

Opening reads the manifest, config.json, the indexes and the headers of ``fse/``, and refuses whatever does not fit together; the
bytes of a tensor are checked when it is read. No torch is imported until then. The format is described in docs/format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fse_convert.checkpoint.header import TensorInfo, header_length, parse_header
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, SIDECAR, SUFFIX
from fse_convert.errors import FseConvertError, NotServable, Problem, some
from fse_convert.servers.targets import Contract
from fse_convert.serving import stated
from fse_convert.serving.stated import RECONVERT, refuse
from fse_convert.sidecar.manifest import FORMAT, FORMAT_VERSION
from fse_convert.sidecar.tensors import LAYOUT, LAYOUT_VERSION, KernelTensorName
from fse_convert.sidecar.typed import natural, text

if TYPE_CHECKING:
    from torch import Tensor

K_PER_WORD = 128
"""K elements per int32 word of packed scales."""
DOWN = re.compile(r"(.+)\.shared_experts?\.(?:.+\.)?(?:w2|down_proj)\.[^.]+")
"""A tensor of a shared expert's down projection, and the prefix of its layer."""
UPGRADE = "install the fse-convert that wrote it, or a later one"
UNPROVED = (
    "%s was written with --verify none: its manifest has no digests, so neither config.json nor the shared experts' bytes were "
    "compared with what the conversion wrote"
)
"""For the loaders' logs; see `Sidecar.proved`."""


class Widths(NamedTuple):
    """Width of one expert: in the source, in the output's standard layout, and in its kernel layout."""

    source: int
    main: int
    kernel: int


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

    ``contract``: name of the kernel contract that it was made for. ``layers``: prefixes as in the checkpoint, such as
    ``layers.3.ffn.experts``, in the order of the shards. ``hidden`` is 0 when no layer is in kernel layout. ``digests``: XXH3-128
    of every tensor of OUT; None when the output was written without proof.
    """

    folder: Path
    manifest: Mapping[str, Any]
    contract: str
    layout: str
    layout_version: int
    widths: Widths
    n_shared: int
    hidden: int
    layers: tuple[str, ...]
    digests: Mapping[str, str] | None = field(repr=False)
    _places: Mapping[str, TensorInfo] = field(repr=False)
    _handles: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """Width of all shared experts of a layer together."""
        return self.n_shared * self.widths.kernel

    @property
    def proved(self) -> bool:
        """Whether files and tensors can be compared with what the conversion wrote; if not, a loader says so: `UNPROVED`."""
        return self.digests is not None and self.manifest["files"] is not None

    def nbytes(self, prefix: str) -> int:
        """Bytes of one layer's four tensors."""
        return sum(self._places[f"{prefix}.{part.value}"].nbytes for part in KernelTensorName)

    def tensors(self, prefix: str) -> KernelShared:
        """The four tensors of a layer; raises NotServable when it is not there."""
        return KernelShared(*(self.tensor(prefix, part) for part in KernelTensorName))

    def tensor(self, prefix: str, part: KernelTensorName) -> Tensor:
        """Read one tensor of a layer, as the kernel takes it; raises NotServable when it is not there, or not as it was written."""
        name = f"{prefix}.{part.value}"
        if name not in self._places:
            message = f"no shared experts of {prefix} in kernel layout"
            raise NotServable(Problem("sidecar-layer", message, self._where, RECONVERT))
        shard = self._places[name].shard
        tensor = self._get(shard, name)
        if self.digests is not None:
            stated.check_bytes(name, tensor, self.digests.get(name), str(self.folder / shard))
        return tensor.t() if part in {KernelTensorName.L1_SCALE, KernelTensorName.L2_SCALE} else tensor

    def check_original(self, prefix: str) -> None:
        """Refuse a sidecar beside the shards of another checkpoint of the same shapes, or beside shards that changed.

        Of a layer's shared experts the down projections are read out of the shards, a third of their bytes: config and index do
        not tell one such checkpoint from another. Raises NotServable.
        """
        from safetensors import SafetensorError

        for name in self._downs.get(prefix, ()):
            shard = self._weight_map.get(name, self._single)
            if not (self.folder / shard).is_file():
                continue  # not fetched yet, so of the revision that fse/ is of
            try:
                actual = stated.xxh3_128(self._get(shard, name))
            except SafetensorError as e:  # of this size, and with other tensors or none
                actual = str(e)
            if actual != (self.digests or {})[name]:
                message = f"{name} is not what the conversion wrote: fse/ is of another checkpoint, or the shard has changed"
                refuse("sidecar-stale", message, self.folder / shard, RECONVERT)

    @cached_property
    def _downs(self) -> Mapping[str, list[str]]:
        """Names of the down projections' tensors of the shared experts in the standard layout, by prefix in ``fse/``."""
        found: dict[str, list[str]] = {prefix: [] for prefix in self.layers}
        for match in filter(None, map(DOWN.fullmatch, self.digests or ())):
            found.get(f"{match[1]}.experts", []).append(match[0])
        return found

    @cached_property
    def _weight_map(self) -> Mapping[str, str]:
        """Shard by tensor name in the standard layout; empty where there is no index."""
        index = self.folder / INDEX
        weight_map = _json(index).get("weight_map") if index.is_file() else None
        return weight_map if isinstance(weight_map, dict) else {}

    @cached_property
    def _single(self) -> str:
        """The shard of a checkpoint without an index."""
        return next((path.name for path in self.folder.glob(f"*{SUFFIX}")), "") if not self._weight_map else ""

    def _get(self, shard: str, name: str) -> Tensor:
        from safetensors import safe_open

        if shard not in self._handles:
            self._handles[shard] = safe_open(self.folder / shard, framework="pt")
        tensor: Tensor = self._handles[shard].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Forget the open shards; tensors that were read stay valid."""
        self._handles.clear()

    @property
    def _where(self) -> str:
        return str(self.folder / SIDECAR)

    def check(self, *, hidden: int, routed_width: int, n_shared: int, contract: Contract, target: str = "") -> None:
        """Refuse, with every reason, what the server's model cannot run fused.

        ``routed_width``: of one routed expert as the kernel is called with it, the server's own padding included.
        ``contract``: of the server's kernel. ``target``: what to convert for instead; the contract unless given.
        Raises NotServable.
        """
        if not self.layers:
            hint = f"see why: fse-convert inspect CHECKPOINT --target {target or contract.name}"
            raise NotServable(Problem("sidecar-empty", "no layer's shared experts are in kernel layout", self._where, hint))
        found = [*self._shape_problems(hidden, n_shared), *self._width_problems(routed_width, contract, target or contract.name)]
        if found:
            raise NotServable(*found)

    def _shape_problems(self, hidden: int, n_shared: int) -> list[Problem]:
        problems = []
        if hidden != self.hidden:
            message = f"hidden size is {self.hidden}, the model's is {hidden}"
            problems.append(Problem("hidden-mismatch", message, self._where, RECONVERT))
        if n_shared != self.n_shared:
            message = f"holds {self.n_shared} shared experts per layer, the model has {n_shared}"
            problems.append(Problem("shared-count-mismatch", message, self._where, RECONVERT))
        return problems

    def _width_problems(self, routed_width: int, contract: Contract, target: str) -> list[Problem]:
        width, problems = self.widths.kernel, []
        hint = f"convert the original checkpoint for this server: fse-convert CHECKPOINT OUT --target {target}"
        if width % contract.width_multiple or self.hidden % contract.hidden_multiple:
            message = (
                f"made for {self.contract}: width {width} and hidden size {self.hidden}; the server's kernel ({contract.name}) "
                f"takes multiples of {contract.width_multiple} and {contract.hidden_multiple}"
            )
            problems.append(Problem("contract-mismatch", message, self._where, hint))
        if width != routed_width:
            message = f"shared experts are {width} wide, this server's routed experts {routed_width}: the kernel takes one width"
            if self.widths.main != width:
                hint += f"; or without --experts {self._arguments.get('experts', 'shared')}"
            problems.append(Problem("width-mismatch", message, self._where, hint))
        return problems

    @property
    def _arguments(self) -> Mapping[str, Any]:
        arguments = self.manifest.get("arguments")
        return arguments if isinstance(arguments, dict) else {}


def open_sidecar(folder: Path | str, *, whole: bool = True) -> Sidecar:
    """Open the sidecar of a converted checkpoint and check it against itself and the folder; ``folder`` is OUT.

    ``whole``: OUT has all of its shards, and nobody else's. Raises NotServable for a folder that fse-convert did not write, for a
    format or layout that this release does not know, and for files that are missing, incomplete or not those that were written.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    try:
        layout, model = manifest["layout"], manifest["model"]
        name, version, width = layout["name"], layout["version"], model["width"]
        contract, n_shared = text(manifest["contract"]["name"]), natural(model["n_shared_experts"])
        widths = Widths(*(natural(width[key]) for key in Widths._fields))
        claims = stated.read_stated(manifest)
    except (KeyError, TypeError, ValueError) as e:
        refuse("manifest-invalid", f"not as fse-convert writes it: {e!r}", folder / MANIFEST, RECONVERT)
    if (name, version) != (LAYOUT, LAYOUT_VERSION):
        message = f"kernel layout {name!r} version {version!r}, this release knows {LAYOUT!r} version {LAYOUT_VERSION}"
        refuse("layout-unknown", message, folder / MANIFEST, UPGRADE)
    stated.check_files(folder, claims.files, whole=whole)
    places = _places(folder, {"fse_contract": contract, "fse_layout": name, "fse_layout_version": str(version)})
    layers = tuple(dict.fromkeys(n.rpartition(".")[0] for n in places))
    stated.check_layers(folder, claims.layers, layers)
    hidden = _check_shapes(folder, places, layers, n_shared * widths.kernel)
    return Sidecar(folder, manifest, contract, name, version, widths, n_shared, hidden, layers, claims.tensors, places)


def is_converted(folder: Path | str) -> bool:
    """Whether fse-convert wrote this folder."""
    return (Path(folder) / MANIFEST).is_file()


def locate(model: str, revision: str | None = None, cache: str | None = None) -> Path:
    """Folder of a model: itself, or for a name on the Hugging Face Hub the snapshot, with ``fse/`` and what decides downloaded.

    Raises what huggingface_hub raises; offline it looks in the cache only.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, cache_dir=cache, allow_patterns=[f"{SIDECAR}/*", CONFIG, INDEX]))


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        refuse("sidecar-missing", f"no {MANIFEST}: this folder was not written by fse-convert", folder, RECONVERT)
    manifest = _json(path)
    if manifest.get("format") != FORMAT:
        refuse("manifest-invalid", f"format is {manifest.get('format')!r}, not {FORMAT!r}", path, RECONVERT)
    if manifest.get("format_version") != FORMAT_VERSION:
        message = f"format version {manifest.get('format_version')!r}, this release knows {FORMAT_VERSION}"
        refuse("manifest-version", message, path, UPGRADE)
    stated.check_digest(manifest, folder)
    return manifest


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        refuse("manifest-invalid", f"not readable as JSON: {e}", path, RECONVERT)
    if not isinstance(value, dict):
        refuse("manifest-invalid", f"a JSON {type(value).__name__}, not an object", path, RECONVERT)
    return value


def _places(folder: Path, metadata: Mapping[str, str]) -> dict[str, TensorInfo]:
    """Where every kernel-layout tensor is, from the index and the headers of its shards."""
    index = folder / SIDECAR / INDEX
    if not index.is_file():
        return {}
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) and Path(v).name == v for v in weight_map.values()):
        refuse("sidecar-incomplete", "no weight_map from tensors to files of this folder", index, RECONVERT)
    places: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        places.update(_shard(folder, f"{SIDECAR}/{shard}", metadata))
    odd = set(places) ^ set(weight_map)
    if odd:
        refuse("sidecar-incomplete", f"index and shards differ in {some(sorted(odd))}", index, RECONVERT)
    # The tripwire is for loaders that do not know this folder.
    return {name: info for name, info in places.items() if info.shape != (0,)}


def _shard(folder: Path, name: str, expected: Mapping[str, str]) -> dict[str, TensorInfo]:
    path = folder / name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(file.read(32), size, name)
            file.seek(8)
            header = parse_header(file.read(length), size, name)
    except OSError as e:
        refuse("sidecar-incomplete", f"cannot be read: {e.strerror or e}", path, RECONVERT)
    except FseConvertError as e:
        raise NotServable(*e.problems) from e
    found = {key: header.metadata.get(key) for key in expected}
    if found != expected:
        refuse("layout-unknown", f"says {found}, the manifest says {dict(expected)}", path, RECONVERT)
    return {t.name: t for t in header.tensors}


def _check_shapes(folder: Path, places: Mapping[str, TensorInfo], layers: tuple[str, ...], s: int) -> int:
    """Every layer has its four tensors, in the shapes that the manifest's width gives; returns the hidden size."""
    h = 0
    for prefix in layers:
        parts = {part: places.get(f"{prefix}.{part.value}") for part in KernelTensorName}
        l1 = parts[KernelTensorName.L1_WEIGHT]
        h = h or (l1.shape[-1] if l1 and l1.shape else 0)
        expected = {
            KernelTensorName.L1_WEIGHT: ("F8_E4M3", (2 * s, h)),
            KernelTensorName.L1_SCALE: ("I32", (h // K_PER_WORD, 2 * s)),
            KernelTensorName.L2_WEIGHT: ("F8_E4M3", (h, s)),
            KernelTensorName.L2_SCALE: ("I32", (s // K_PER_WORD, h)),
        }
        for part, info in parts.items():
            if info is None or (info.dtype, info.shape) != expected[part]:
                found = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                dtype, shape = expected[part]
                message = f"{prefix}.{part.value} {found}, expected {dtype} {list(shape)}"
                refuse("sidecar-incomplete", message, folder / SIDECAR, RECONVERT)
    return h
