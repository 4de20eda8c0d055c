"""Whether a folder is what its ``fse/manifest.json`` states: the manifest itself, the files around it, layers, bytes of tensors.

config.json and the index are read whole, since they decide what a server loads; of shards only names and sizes are looked at:
``fse-convert verify`` reads those. No torch is imported before the first tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, SIDECAR, SUFFIX
from fse_convert.errors import NotServable, Problem, some
from fse_convert.servers.verdict import Outcome
from fse_convert.sidecar.manifest import DIGEST, own_digest
from fse_convert.sidecar.typed import natural, text

if TYPE_CHECKING:
    from torch import Tensor

RECONVERT = "convert the original checkpoint again: fse-convert CHECKPOINT OUT"
AGAIN = "fetch the output again, or convert again"
DECIDES = {
    CONFIG: "put the written one back; to change a config leave the file alone: vLLM --hf-overrides, SGLang "
    "--json-model-override-args; or convert the changed checkpoint again",
    INDEX: f"put the written one back, or {RECONVERT}",
}
"""The files that decide what is loaded, with what to do about another one."""


class File(NamedTuple):
    """What the manifest states of a file: size in bytes and SHA-256 as hex."""

    size: int
    sha256: str


class Stated(NamedTuple):
    """What a manifest states, typed.

    ``files`` by name below OUT, ``tensors``: XXH3-128 by name; both None when the output was written with ``--verify none``.
    ``layers``: prefixes in ``fse/`` of the layers with the verdict fused.
    """

    files: Mapping[str, File] | None
    tensors: Mapping[str, str] | None
    layers: tuple[str, ...]


def refuse(code: str, message: str, where: Path | str, hint: str = "") -> NoReturn:
    """Raise NotServable with one problem."""
    raise NotServable(Problem(code, message, str(where), hint))


def check_digest(manifest: Mapping[str, Any], folder: Path) -> None:
    """Refuse a manifest that is not as it was written: its own digest, over everything else in it. Raises NotServable."""
    try:
        actual = own_digest(manifest)
    except (ValueError, RecursionError) as e:
        refuse("manifest-damaged", f"cannot be encoded again: {e}", folder / MANIFEST, AGAIN)
    if manifest.get(DIGEST) != actual:
        message = f"it is not as it was written: {DIGEST} states {manifest.get(DIGEST)!r:.80}, its content gives {actual}"
        refuse("manifest-damaged", message, folder / MANIFEST, AGAIN)


def read_stated(manifest: Mapping[str, Any]) -> Stated:
    """Type the parts of a manifest that are checked here; raises KeyError, TypeError or ValueError for any other content."""
    files, tensors = manifest["files"], manifest["tensors"]
    if not isinstance(files, dict | None) or not isinstance(tensors, dict | None):
        raise TypeError("files and tensors are objects or null")
    if tensors is not None and not all(isinstance(digest, str) for digest in tensors.values()):
        raise TypeError("tensors maps names to digests")
    return Stated(
        None if files is None else {name: File(natural(f["size"]), text(f["sha256"])) for name, f in files.items()},
        tensors,
        tuple(f"{text(layer['name'])}.experts" for layer in manifest["layers"] if layer["verdict"] == Outcome.FUSED.value),
    )


def check_files(folder: Path, files: Mapping[str, File] | None, *, whole: bool) -> None:
    """Refuse, with every reason, a folder whose files are not those that the conversion wrote; None: it did not say.

    ``whole``: everything should be here, as in a folder of one's own; of a repository on the hub the server fetches the shards
    later, and by its own choice. Raises NotServable.
    """
    if files is None:
        return
    found = [*_deciding(folder, files, whole), *_written(folder, files, whole), *(_foreign(folder, files) if whole else ())]
    if found:
        raise NotServable(*found)


def _deciding(folder: Path, files: Mapping[str, File], whole: bool) -> Iterator[Problem]:
    """Config and index of another conversion, or edited since: with them another model is loaded."""
    for name, hint in DECIDES.items():
        path, stated = folder / name, files.get(name)
        if not path.is_file():
            if stated and whole:
                yield Problem("sidecar-incomplete", "the conversion wrote this file, the folder has none", str(path), AGAIN)
        elif stated is None:
            yield Problem("sidecar-stale", "the conversion wrote no such file", str(path), RECONVERT)
        elif (actual := sha256(path.read_bytes())) != stated.sha256:
            message = f"is not the file that the conversion wrote: SHA-256 {actual}, the manifest states {stated.sha256}"
            yield Problem("sidecar-stale", message, str(path), hint)


def _written(folder: Path, files: Mapping[str, File], whole: bool) -> Iterator[Problem]:
    """Files that the conversion wrote and that are missing, and shards of another size."""
    for name, stated in files.items():
        path, in_sidecar = folder / name, name.startswith(f"{SIDECAR}/")
        if path.is_file():
            if name.endswith(SUFFIX) and (size := path.stat().st_size) != stated.size:
                yield Problem("sidecar-stale", f"has {size} bytes, the conversion wrote {stated.size}", str(path), RECONVERT)
        elif in_sidecar:
            yield Problem("sidecar-incomplete", "the conversion wrote this file, the folder has none", str(path), AGAIN)
        elif whole and name.endswith(SUFFIX) and "/" not in name:
            yield Problem("shard-missing", "the conversion wrote this shard, the folder has none", str(path), AGAIN)


def _foreign(folder: Path, files: Mapping[str, File]) -> Iterator[Problem]:
    """Shards that the conversion did not write: without an index, servers read every one (vllm-project/vllm#54230)."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.name not in files:
            yield Problem("shard-unlisted", "the conversion did not write this shard", str(path), "move it out of the folder")


def check_layers(folder: Path, stated: Iterable[str], found: Iterable[str]) -> None:
    """Refuse a sidecar that holds other layers than those of the verdict fused; it is empty where there is none.

    Raises NotServable.
    """
    stated, found = set(stated), set(found)
    for names, what in ((stated - found, "lacks"), (found - stated, "has, beyond those of the manifest,")):
        if names:
            message = f"{what} {len(names)} layers in kernel layout: {some(sorted(names))}"
            refuse("sidecar-incomplete", message, folder / SIDECAR, AGAIN)


def xxh3_128(stored: Tensor) -> str:
    """XXH3-128 of the bytes of a contiguous tensor on the CPU, as hex; without numpy and without a copy."""
    import xxhash

    memory = (ctypes.c_char * stored.nbytes).from_address(stored.data_ptr())
    return xxhash.xxh3_128(memory).hexdigest()


def check_bytes(name: str, stored: Tensor, digest: str | None, where: str) -> None:
    """Refuse a tensor, contiguous as stored, whose bytes do not have the XXH3-128 that the manifest states. Raises NotServable."""
    actual = xxh3_128(stored)
    if actual != digest:
        message = f"{name} is not as it was written: XXH3-128 {actual}, the manifest states {digest}"
        refuse("sidecar-damaged", message, where, f"see what else is: fse-convert verify OUT; {AGAIN}")
