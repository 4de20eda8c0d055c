"""Sources, their conversions and damaged copies of those for `test_vllm_formats.py`, and the run of the driver that loads them.

A release answers all of its cases for a GPU in one run of the driver, since starting vLLM takes longer than loading a small model.
Workers of pytest-xdist share folders and answers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.patch import edit_config, flip
from tests.peers import wheels
from tests.peers.vllm_cases import Sources, locked

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LAYERS, EXPERTS = 2, 4
# Few positions, since vLLM's rotary tables would take longer than all the rest.
SIZES = {"hidden": 512, "width": 256, "layers": LAYERS, "experts": EXPERTS, "vocab": 128, "max_position_embeddings": 4096}
ATTENTION = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_attention_heads": 4, "o_lora_rank": 128}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "v4": ("v4-flash", {**SIZES, **ATTENTION, "mtp": 1}),
    # Three layers, since the first KV source is the third.
    "v4.1": ("v4.1-flash", {**SIZES, **ATTENTION, "layers": 3, "mtp": 1, "engram_rows": 4096, "engram_vocab_size": 1000,
                            "engram_compressed_vocab_size": 100}),
    "kimi-k2": ("kimi-k2-quark", {**SIZES, "mtp": 0}),
    "glm-4.5": ("glm-4.5-quark", SIZES),
}  # fmt: skip
CHANGES = {"fp8": ("--routed", "fp8"), "mxfp4": ("--shared", "mxfp4", "--lossy"), "target": ("--target", "vllm-0.33-aiter")}
SHARED_OF_MTP = tuple(f"mtp.0.ffn.shared_experts.w{number}" for number in (1, 2, 3))


class Case(NamedTuple):
    """One load: a source, the change that made a checkpoint of it (none: as it is), what was done to that, and the server."""

    source: str
    change: str = ""
    damage: str = ""
    gpu: str = "sm100"
    fse: bool = False
    draft: str = ""

    @property
    def checkpoint(self) -> str:
        """A name for the folder."""
        return " ".join(part for part in self[:3] if part)

    def __str__(self) -> str:
        return " ".join(part for part in (self.checkpoint, self.gpu, "fse" * self.fse, self.draft) if part)


NVIDIA = partial(Case, gpu="sm100")
AMD = partial(Case, gpu="gfx950")
FSE = partial(Case, gpu="gfx950", fse=True)


def checkpoint(work: Path, case: Case) -> Path:
    """Make a case's folder, once."""
    folder = work / case.checkpoint
    with locked(folder):
        if not folder.exists():
            fresh = work / f"{case.checkpoint}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            if case.damage:
                DAMAGE[case.damage](Path(shutil.copytree(checkpoint(work, case._replace(damage="")), fresh)))
            elif case.change:
                convert(checkpoint(work, Case(case.source)), fresh, CHANGES[case.change])
            else:
                kind, knobs = SOURCES[case.source]
                make_checkpoint(fresh, kind, **knobs)
            fresh.rename(folder)
    return folder


def convert(source: Path, out: Path, options: Sequence[str]) -> None:
    """Run fse-convert."""
    command = [sys.executable, "-m", "fse_convert", str(source), str(out), *options, "--drop-originals", "--verify", "none"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=one_thread)
    assert done.returncode == 0, done.stderr[-3000:]


def rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Change tensors under the same names."""
    for shard in folder.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})


def e8m0_scales(experts: str, folder: Path) -> None:
    """Give the block scales of routed or shared experts the dtype that they have in the source: the same values."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float8_e8m0fnu) if f".{experts}." in name and name.endswith(".scale") else tensor

    rewrite(folder, change)


def mxfp4_shared_of_mtp(folder: Path) -> None:
    """Store the shared experts of the MTP layer as MXFP4 too, as those of the other layers are."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.startswith(SHARED_OF_MTP):
            return tensor
        rows, columns = tensor.shape
        size = (rows, columns // 2) if name.endswith(".weight") else (rows * 128, columns * 4)
        return torch.full(size, 0x11 if name.endswith(".weight") else 127, dtype=torch.uint8)

    rewrite(folder, change)
    drop_entries(folder, ".ffn.shared_experts.")


def drop_entries(folder: Path, part: str) -> None:
    """Remove modules from Quark's config by a part of their names."""

    def change(config: dict[str, Any]) -> None:
        entries = config["quantization_config"]["layer_quant_config"]
        for name in [name for name in entries if part in name]:
            del entries[name]

    edit_config(folder, change)


def misplaced_expert_dtype(folder: Path) -> None:
    """Say ``expert_dtype`` where V4.1 has it."""
    edit_config(folder, lambda config: config["quantization_config"].update(expert_dtype=config.pop("expert_dtype")))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "e8m0-routed": partial(e8m0_scales, "experts"),
    "e8m0-shared": partial(e8m0_scales, "shared_experts"),
    "byte-routed": lambda folder: flip(folder, 4321, "layers.1.ffn.experts.2.w3.weight"),
    "byte-shared": lambda folder: flip(folder, 4321, "layers.1.ffn.shared_experts.w2.weight"),
    "byte-scale": lambda folder: flip(folder, -1, "layers.0.ffn.experts.1.w2.scale"),
    "mxfp4-mtp": mxfp4_shared_of_mtp,
    "no-twins": lambda folder: drop_entries(folder, f"layers.{LAYERS}."),
    "expert-dtype": misplaced_expert_dtype,
}


def answers(work: Path, python: Path, release: str, cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """What a release makes of cases for one GPU, by their text; asked once for all workers."""
    kept = work / f"{release} {cases[0].gpu}.json"
    with locked(kept):
        if not kept.exists():
            found = run(work, python, release, [arguments(work, case) for case in cases])
            kept.write_text(json.dumps(dict(zip(map(str, cases), found, strict=True))))
    result: dict[str, dict[str, Any]] = json.loads(kept.read_text())
    return result


def arguments(work: Path, case: Case) -> list[str]:
    """Return what the driver is called with; shared experts that were rounded are compared as they were stored."""
    command = [str(checkpoint(work, case)), "--source", str(checkpoint(work, Case(case.source))), "--gpu", case.gpu]
    if case.change == "mxfp4":
        command += ["--shared-source", str(checkpoint(work, case._replace(damage="")))]
    return command + ["--fse"] * case.fse + ["--draft", case.draft] * bool(case.draft)


def run(work: Path, python: Path, release: str, commands: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Run the driver in vLLM's environment, with the files of an earlier release first on the path."""
    path = [] if release == "0.33" else [wheels.fetch(Sources("vllm", f"{release}.0", ("*.py", "*.json")))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*path, REPOSITORY])),
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(work / "cache"),
    }
    driver = [str(python), str(HERE / "drivers" / "vllm_load.py")]
    lines = "\n".join(map(json.dumps, commands))
    done = subprocess.run(driver, input=lines, capture_output=True, text=True, check=False, env=environment, cwd=work)
    assert "@@@" in done.stdout, done.stderr[-4000:]
    result: list[dict[str, Any]] = json.loads(done.stdout.rpartition("@@@")[2])
    return result
