"""Checkpoints, damaged copies and cases for `test_vllm_serving.py`, and the run of the driver that answers them.

Every release answers all of its cases in one process, since starting vLLM takes longer than loading a small model. Workers
of pytest-xdist share folders and answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open

from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.patch import edit_config, edit_manifest, find, flip
from tests.peers import make_env, wheels

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
Answer = dict[str, Any]

HIDDEN, WIDTH, PADDED, EXPERTS = 512, 640, 1024, 4
SIZES = {"hidden": HIDDEN, "width": WIDTH, "experts": EXPERTS, "vocab": 128}
SOURCES: dict[str, dict[str, Any]] = {
    "v4": {"kind": "v4-flash", "layers": 2, "mtp": 1},
    "v4-one-file": {"kind": "v4-flash", "layers": 1, "mtp": 0, "single_file": True},
    "v4-two": {"kind": "v4-flash", "layers": 1, "mtp": 0, "shared": 2},
    # What V4.1's attention and engrams accept; three layers, since the first KV source is the third.
    "v4.1": {
        "kind": "v4.1-flash", "layers": 3, "mtp": 1, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
        "num_attention_heads": 4, "engram_rows": 4096, "engram_vocab_size": 1000, "engram_compressed_vocab_size": 100,
    },
}  # fmt: skip
LAYERS = {name: [f"layers.{i}.ffn" for i in range(knobs["layers"])] for name, knobs in SOURCES.items()}
OUTPUTS = {
    "all-512": ("--target", "megamoe-512"),
    "shared-512": ("--target", "megamoe-512", "--experts", "shared"),
    "all-128": ("--target", "megamoe-128"),
    "shared-128": ("--target", "megamoe-128", "--experts", "shared"),
}
PARTS = ("shared_l1_weight", "shared_l1_weight_scale", "shared_l2_weight", "shared_l2_weight_scale")
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
DSPARK = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
FUSION_OFF = {"VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION": "1"}


class Sources(wheels.Peer):
    """All Python files of a release, kept apart from the few that other tests use; the same folder as in test_aiter_vllm.py."""

    def __str__(self) -> str:
        return f"{super().__str__()}-sources"


@dataclass(frozen=True)
class Case:
    """One load: ``source`` and ``output`` name a checkpoint (output empty: unconverted), ``damage`` a change of it."""

    source: str
    model: str
    output: str = ""
    load_format: str = "fse"
    damage: str = ""
    sabotage: bool = False
    arguments: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        parts = [self.model, self.source, self.output or "unconverted", self.load_format, self.damage, "sabotage" * self.sabotage]
        return " ".join(p for p in (*parts, *(k for k, _ in self.arguments), *(k for k, _ in self.environment)) if p)

    def stock(self) -> Case:
        """The same checkpoint through the unmodified loader."""
        return Case(self.source, self.model, self.output, "auto", arguments=self.arguments, environment=self.environment)


def case(source: str, model: str, output: str = "", load_format: str = "fse", **options: Any) -> Case:
    """Make a case; dictionaries are frozen."""
    frozen = {k: tuple(v.items()) if isinstance(v, dict) else v for k, v in options.items()}
    return Case(source, model, output, load_format, **frozen)


V4, V4_1 = partial(case, "v4", "v4"), partial(case, "v4.1", "v4.1")
WRAPPER = partial(case, "v4.1", "v4.1-vl")  # what vLLM's registry serves V4.1 with
PAIRS = [V4("all-512"), V4_1("all-512"), WRAPPER("all-512"), case("v4", "v4-mtp", "all-512", arguments=MTP)]
EVERYWHERE = [
    *PAIRS,
    *(pair.stock() for pair in PAIRS),
    V4("", "auto"), V4("shared-512", "auto"), V4("shared-512"), V4("all-128"), V4("shared-128"), V4(""),
    V4("all-512", sabotage=True), V4("all-512", damage="byte"), V4("all-512", damage="layer"), V4("all-512", damage="version"),
    V4("all-512", damage="silent"), V4("all-512", damage="shard"), V4("all-512", damage="config"), V4("all-512", damage="manifest"),
    V4("all-512", "auto", damage="alone"), V4_1("all-512", "auto", damage="alone"), V4("all-512", environment=FUSION_OFF),
]  # fmt: skip
ONLY_0_33 = [
    case("v4-two", "v4", "all-512"), case("v4-two", "v4", "all-512", "auto"),
    case("v4-one-file", "v4", "all-512"), case("v4-one-file", "v4", "all-512", "auto"), V4("all-512", damage="count"),
    V4("all-512", damage="unproved"),
    V4_1("all-128"), V4_1("all-128", "auto"), V4_1("", "auto"),
    V4("all-512", arguments={"model_loader_extra_config": {"enable_multithread_load": True}}),
    case("v4.1", "v4.1-dspark", "all-512", arguments=DSPARK, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    case("v4.1", "v4.1-dspark", "all-512", "auto", arguments=DSPARK, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
]  # fmt: skip
FUSE_AS_IT_IS = [  # what README says of a release: the source as it is, and --target megamoe-128, with and without the plugin
    V4("all-512"), V4("all-512", "auto"), WRAPPER("all-512"), WRAPPER("all-512", "auto"), V4("shared-512"),
    V4("", "auto"), V4("all-128"), V4("all-128", "auto"), WRAPPER("", "auto"), WRAPPER("all-128"), WRAPPER("all-128", "auto"),
]  # fmt: skip
FP8_CACHE = {"kv_cache_dtype": "fp8"}  # 0.29 builds V4's attention with no other
CASES: dict[str, list[Case]] = {
    "0.33": EVERYWHERE + ONLY_0_33,
    "0.30": [*EVERYWHERE, WRAPPER("shared-512"), WRAPPER("shared-512", "auto")],
    "0.32": FUSE_AS_IT_IS,
    "0.31": FUSE_AS_IT_IS,
    "0.29": [V4("all-512", arguments=FP8_CACHE), V4("all-512", "auto", arguments=FP8_CACHE)],
}


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock beside a path; the other workers wait, or get a BlockingIOError."""
    with path.with_name(f"{path.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


class Workshop:
    """Makes checkpoints, their conversions and damaged copies of those, each once, in one folder."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        self.folder, self.sizes = folder, {**SIZES, **sizes}

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        folder = self.folder / name
        with locked(folder):
            if not folder.exists():
                new = folder.with_name(f"{name}.new")
                shutil.rmtree(new, ignore_errors=True)
                make(new)
                new.rename(folder)
        return folder

    def source(self, name: str) -> Path:
        return self.once(name, lambda new: make_checkpoint(new, **{**self.sizes, **SOURCES[name]}))

    def output(self, name: str, output: str) -> Path:
        def convert(new: Path) -> None:
            command = [
                sys.executable,
                "-m",
                "fse_convert",
                str(self.source(name)),
                str(new),
                *OUTPUTS[output],
                "--verify",
                "storage",
            ]
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=one_thread)
            assert done.returncode == 0, done.stderr[-3000:]

        return self.once(f"{name}-{output}", convert)

    def checkpoint(self, of: Case) -> Path:
        if not of.output:
            return self.source(of.source)
        whole = self.output(of.source, of.output)
        if not of.damage:
            return whole
        return self.once(f"{whole.name}-{of.damage}", lambda new: DAMAGE[of.damage](whole, new))


def _one_byte(whole: Path, new: Path, *, stated: bool = True) -> None:
    """The first byte of a layer's L1 weight is another one, in the manifest's digest too, if it is to be ``stated``."""
    shutil.copytree(whole, new)
    name = f"layers.1.ffn.experts.{PARTS[0]}"
    flip(new, 0, name)
    if stated:
        path, offset, _ = place = find(new, name)
        _edit(new, ("tensors", name), xxhash.xxh3_128_hexdigest(path.read_bytes()[offset : offset + place.nbytes]))


def _one_byte_of_a_shard(whole: Path, new: Path) -> None:
    """A shared expert in the standard layout is another one, as in another checkpoint of the same shapes."""
    shutil.copytree(whole, new)
    flip(new, 0, "layers.1.ffn.shared_experts.w2.weight")


def _unproved(whole: Path, new: Path) -> None:
    """The manifest as ``--verify none`` leaves it, and a config.json that nobody can compare."""
    _another_config(whole, new)
    for key in ("files", "tensors"):
        _edit(new, (key,), None)


def _another_config(whole: Path, new: Path) -> None:
    """Somebody has edited config.json, in a value that no shape depends on."""
    shutil.copytree(whole, new)
    edit_config(new, lambda config: config.update(bos_token_id=1))


def _no_layer(whole: Path, new: Path) -> None:
    """The sidecar has never had a layer that the model has: in index, shard and manifest alike."""
    from safetensors.torch import save_file

    shutil.copytree(whole, new)
    shard, index = next((new / "fse").glob("*.safetensors")), new / "fse" / "model.safetensors.index.json"
    with safe_open(shard, framework="pt") as f:
        names = [n for n in f.keys() if not n.startswith("layers.1.")]  # noqa: SIM118
        save_file({n: f.get_tensor(n) for n in names}, shard, metadata=f.metadata())
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, shard.name)}))
    _edit(new, ("files",), None)
    layers = json.loads((new / "fse" / "manifest.json").read_text())["layers"]
    _edit(new, ("layers",), [{**layer, "verdict": "unfused"} if layer["name"] == "layers.1.ffn" else layer for layer in layers])


def _alone(whole: Path, new: Path) -> None:
    """The sidecar as a checkpoint of its own, with the config that a server would need."""
    shutil.copytree(whole / "fse", new)
    shutil.copy(whole / "config.json", new)


def _edit(folder: Path, path: tuple[str, ...], value: Any, *, signed: bool = True) -> None:
    """Change one value of the manifest, and its own digest with it unless it is to be found out."""

    def change(manifest: dict[str, Any]) -> None:
        place = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    edit_manifest(folder, change, signed=signed)


def _edited(path: tuple[str, ...], value: Any, whole: Path, new: Path, *, signed: bool = True) -> None:
    shutil.copytree(whole, new)
    _edit(new, path, value, signed=signed)


def _two_of_half(whole: Path, new: Path) -> None:
    """The same tensors, said to be two shared experts of half the width."""
    _edited(("model", "n_shared_experts"), 2, whole, new)
    _edit(new, ("model", "width", "kernel"), PADDED // 2)


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "byte": _one_byte,
    "silent": partial(_one_byte, stated=False),
    "shard": _one_byte_of_a_shard,
    "config": _another_config,
    "unproved": _unproved,
    "manifest": partial(_edited, ("model", "family"), "another", signed=False),
    "layer": _no_layer,
    "alone": _alone,
    "version": partial(_edited, ("layout", "version"), 2),
    "count": _two_of_half,
}


def kernel_layout(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The tensors of ``OUT/fse`` by layer (``layers.0.ffn``), read by safetensors alone, in the form of the driver's `digest`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for shard in sorted((folder / "fse").glob("*.safetensors")):
        with safe_open(shard, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                stored, (prefix, _, part) = f.get_tensor(name), name.rpartition(".")
                tensor = stored.t() if part.endswith("_scale") else stored
                found.setdefault(prefix.removesuffix(".experts"), {})[part] = {
                    "sha256": hashlib.sha256(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())).hexdigest(),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "stride": list(tensor.stride()),
                }
    return found


def entry_point() -> str:
    """The plugin as pyproject.toml declares it: the text of an entry_points.txt."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    group = re.search(r'^\[project\.entry-points\."vllm\.general_plugins"\]\n((?:[\w-]+ = .+\n)+)', text, re.MULTILINE)
    assert group, "pyproject.toml has no entry point for vLLM"
    return "[vllm.general_plugins]\n" + group.group(1).replace('"', "")


def installed(folder: Path) -> Path:
    """A folder for PYTHONPATH by which the package counts as installed, without touching the environment."""
    info = folder / "fse_convert-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fse-convert\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_point())
    return dependencies(folder)


def dependencies(folder: Path) -> Path:
    """Put what the plugins depend on beside the servers' own packages into a folder for PYTHONPATH: the same interpreter's."""
    with contextlib.suppress(FileExistsError):
        (folder / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    return folder


def run_driver(release: str, workshop: Workshop, cases: Sequence[Case] = ()) -> dict[str, Any]:
    """Answer cases, by default all of a release: ``version`` and ``answers`` by case id."""
    python = make_env.ensure("vllm", Path(os.environ.get("FSE_PEERS_VLLM") or wheels.cache_dir() / "vllm"))
    path = [] if release == "0.33" else [wheels.fetch(Sources("vllm", f"{release}.0", ("*.py", "*.json")))]
    path += [installed(workshop.folder / "installed"), REPOSITORY]
    cases = cases or CASES[release]
    request = [
        {
            "checkpoint": str(workshop.checkpoint(c)),
            "model": c.model,
            "load_format": c.load_format,
            "arguments": dict(c.arguments),
            "environment": dict(c.environment),
            "sabotage": c.sabotage,
        }
        for c in cases
    ]
    rendezvous = workshop.folder / f"rendezvous-{release}"
    rendezvous.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(workshop.folder / "cache"),
        "FSE_RENDEZVOUS": str(rendezvous),
        "FSE_PEERS_DIR": str(wheels.cache_dir()),
    }
    command = [str(python), str(HERE / "drivers" / "vllm_driver.py")]
    done = subprocess.run(
        command,
        input=json.dumps({"cases": request}),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=workshop.folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.rpartition("@@@")[2])
    return {**result, "answers": {c.id: a for c, a in zip(cases, result["answers"], strict=True)}}


def answers(release: str, workshop: Workshop) -> dict[str, Any]:
    """`run_driver`, once for all workers; who would have to wait for another one runs another release meanwhile."""
    kept = workshop.folder / f"answers-{release}.json"
    if not kept.exists() and not _answer(release, workshop, wait=False):
        for other in {"0.33", "0.30"} - {release}:
            _answer(other, workshop, wait=False)
        _answer(release, workshop, wait=True)
    result: dict[str, Any] = json.loads(kept.read_text())
    return result


def _answer(release: str, workshop: Workshop, *, wait: bool) -> bool:
    kept = workshop.folder / f"answers-{release}.json"
    with contextlib.suppress(BlockingIOError), locked(kept, wait=wait):
        if not kept.exists():
            new = kept.with_suffix(".new")
            new.write_text(json.dumps(run_driver(release, workshop)))
            new.rename(kept)
        return True
    return False
