"""Reads the index and the headers of ``OUT/fse`` (docs/format.md, "Files"): what is there, and everything that is wrong with it.

Whether it is what its manifest or a source asks for, the callers decide: servers' loaders and verification.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fse_convert.checkpoint.folder import Folder
from fse_convert.checkpoint.header import LENGTH_BYTES, TensorInfo, header_length, parse_header
from fse_convert.checkpoint.names import SIDECAR, SIDECAR_INDEX, SUFFIX, natural_key
from fse_convert.checkpoint.reader import Shard
from fse_convert.errors import FseConvertError, InvalidCheckpoint, Problem, some
from fse_convert.sidecar.manifest import FETCH_AGAIN, json_object
from fse_convert.sidecar.tensors import is_originals_file

FIRST_READ = 32
"""Bytes that show the length of a header, or that the file is a Git LFS pointer."""


@dataclass(frozen=True, slots=True)
class SidecarContents:
    """The shards that the index of ``fse/`` lists, in natural order, and what is wrong with them; no shards without an index."""

    shards: tuple[Shard, ...]
    problems: tuple[Problem, ...]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Kernel tensors by name, in file order; the tripwire, for loaders that do not know this folder, is left out."""
        return {t.name: t for shard in self.shards for t in shard.header.tensors if t.shape != (0,)}

    @property
    def layers(self) -> tuple[str, ...]:
        """Prefixes of the layers that have kernel tensors, in file order."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))


def read_sidecar(folder: Folder) -> SidecarContents:
    """Read the index of ``fse/`` and the headers of its shards, and compare the two in both directions.

    ``folder``: the output. Raises nothing that a file's content can cause; OSError from ``folder.files``.
    """
    if SIDECAR_INDEX not in folder.files:
        return SidecarContents((), ())
    try:
        weight_map = json_object(folder.read(SIDECAR_INDEX)).get("weight_map")
    except (OSError, ValueError, FseConvertError) as e:
        return SidecarContents((), (Problem("manifest-invalid", str(e), SIDECAR_INDEX, FETCH_AGAIN),))
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) and "/" not in v for v in weight_map.values()):
        message = "no weight_map from tensors to files of this folder"
        return SidecarContents((), (Problem("sidecar-incomplete", message, SIDECAR_INDEX, FETCH_AGAIN),))
    listed = {name: f"{SIDECAR}/{shard}" for name, shard in weight_map.items()}
    shards, problems = read_shards(folder, sorted(set(listed.values()), key=natural_key))
    held = {t.name: shard.name for shard in shards for t in shard.header.tensors}
    unlike = [name for name in sorted(listed.keys() | held.keys()) if listed.get(name) != held.get(name)]
    if unlike and not problems:
        problems.append(Problem("sidecar-incomplete", f"index and shards differ in {some(unlike)}", SIDECAR_INDEX, FETCH_AGAIN))
    return SidecarContents(tuple(shards), tuple(problems))


def shard_names(folder: Folder) -> list[str]:
    """Name every safetensors file of the kernel layout in ``fse/``, listed in its index or not."""
    return [name for name in _safetensors(folder) if not is_originals_file(name)]


def originals_names(folder: Folder) -> list[str]:
    """Name every file in ``fse/`` that keeps source tensors as they were; its index does not list them."""
    return [name for name in _safetensors(folder) if is_originals_file(name)]


def _safetensors(folder: Folder) -> list[str]:
    return sorted((n for n in folder.files if n.startswith(f"{SIDECAR}/") and n.endswith(SUFFIX)), key=natural_key)


def read_shards(folder: Folder, names: Iterable[str]) -> tuple[list[Shard], list[Problem]]:
    """Read the headers of shards; return those that can be read, and what is wrong with the others."""
    shards: list[Shard] = []
    problems: list[Problem] = []
    for name in names:
        try:
            shards.append(_read_shard(folder, name))
        except InvalidCheckpoint as e:
            problems += e.problems
        except OSError as e:
            problems.append(Problem("sidecar-incomplete", f"cannot be read: {e.strerror or e}", name, FETCH_AGAIN))
    return shards, problems


def _read_shard(folder: Folder, name: str) -> Shard:
    if name not in folder.files:
        raise InvalidCheckpoint(Problem("sidecar-incomplete", "the index lists this file, there is none", name, FETCH_AGAIN))
    size = folder.files[name]
    length = header_length(folder.read(name, 0, FIRST_READ), size, name)
    return Shard(name, size, parse_header(folder.read(name, LENGTH_BYTES, length), size, name))
