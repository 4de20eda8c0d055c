"""Checkpoints in another format inside SGLang's own loaders and model classes: every expert, in slots too, has the source's values.

Loaded parameters are compared in float64, in three releases, on a CPU that answers as an SM100, for Quark's form as a gfx950. So is
what SGLang's post-load hooks make of them, but for Quark's, whose hooks are AITER's kernels. No forward pass is run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.patch import flip
from tests.peers.sglang_run import RELEASES, REPOSITORY, locked, once, published, run_driver

pytestmark = pytest.mark.peers

EXPERTS, LAYERS, STAGES, DRAFT_EXPERTS = 3, 2, 2, 2
SIZES = {"hidden": 512, "width": 384, "layers": LAYERS, "experts": EXPERTS, "vocab": 128}
V4 = {"mtp": 1, "o_lora_rank": 128, "num_hash_layers": 0}  # its hash router is a compiled kernel
V41 = {"mtp": STAGES, "mtp_experts": DRAFT_EXPERTS, "engram_rows": 64}
MAIN = 3 * LAYERS * (EXPERTS + 1)
"""Matrices of the main model's experts."""
SHARED = [f"layers.{layer}.ffn.shared_experts.w{number}" for layer in range(LAYERS) for number in (1, 2, 3)]
WEIGHT = "layers.1.ffn.experts.2.w2.weight"
SLOT_SCALE = "layers.0.ffn.shared_experts.w3.scale"


def e8m0_typed(folder: Path) -> None:
    """Give the scales of MXFP4 experts the dtype that they have in DeepSeek's own files."""
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        scales = [name for name in tensors if name.endswith(".weight_scale") and tensors[name].dtype == torch.uint8]
        save_file(tensors | {name: tensors[name].view(torch.float8_e8m0fnu) for name in scales}, shard)


SOURCES: dict[str, tuple[str, dict[str, Any]]] = {  # its kind and its knobs
    "v4": ("v4-flash", SIZES | V4),
    "v4.1": ("v4.1-flash", SIZES | V41),
    "v4 fp8, E8M0": ("v4-flash-fp8", SIZES | V4),  # a source of its own, to be loaded as it is
}
OUTPUTS = {  # its source, and the change
    "v4 fp8": ("v4", ("--routed", "fp8")),
    "v4.1 fp8": ("v4.1", ("--routed", "fp8")),
    "v4 quark": ("v4", ("--shared", "mxfp4", "--lossy")),
}
DAMAGED: dict[str, tuple[str, Callable[[Path], object]]] = {  # the output, and what is done to it
    "v4 fp8, a damaged weight": ("v4 fp8", lambda folder: flip(folder, 12345, WEIGHT)),
    "v4 fp8, a damaged scale": ("v4 fp8", lambda folder: flip(folder, -1, SLOT_SCALE)),
    "v4 quark, a damaged weight": ("v4 quark", lambda folder: flip(folder, 12345, WEIGHT)),
    "v4 quark, scales typed E8M0": ("v4 quark", e8m0_typed),
}


class Case(NamedTuple):
    """A folder to load, the main model or a drafter of it, and whether SGLang is asked for slots."""

    folder: str
    draft: str
    slots: bool

    @property
    def quark(self) -> bool:
        return self.folder.startswith("v4 quark")

    @property
    def source(self) -> str:
        output = DAMAGED[self.folder][0] if self.folder in DAMAGED else self.folder
        return OUTPUTS[output][0] if output in OUTPUTS else output


GOOD = [
    Case(folder, draft, slots)
    for folder, drafts in {
        "v4 fp8": ("", "nextn"),
        "v4 fp8, E8M0": ("", "nextn"),
        "v4.1 fp8": ("", "dspark"),
        "v4 quark": ("", "nextn"),
    }.items()
    for draft in drafts
    for slots in (False, True)
]
BAD = [*(Case(folder, "", True) for folder in DAMAGED), Case("v4", "", True)]
MODELS = {"": "DeepseekV4ForCausalLM", "nextn": "DeepseekV4ForCausalLMNextN", "dspark": "DeepseekV4ForCausalLMDSpark"}
COUNTS = {"": (LAYERS, MAIN), "nextn": (1, MAIN // LAYERS), "dspark": (STAGES, 3 * STAGES * (DRAFT_EXPERTS + 1))}
"""MoE layers and matrices by drafter; that of V4 has as many experts as a layer."""


@pytest.fixture(scope="session")
def folder(work: Path) -> Callable[[str], Path]:
    """Make a source, an output of it, or a damaged output, once."""

    def make(name: str) -> Path:
        place = work / f"formats {name}"
        with locked(place):
            if not place.exists():
                build(name, fresh := work / f"{name}.new")
                fresh.rename(place)
        return place

    def build(name: str, out: Path) -> None:
        if name in SOURCES:
            kind, knobs = SOURCES[name]
            make_checkpoint(out, kind, **knobs)
        elif name in OUTPUTS:
            source, change = OUTPUTS[name]
            options = [*change, "--drop-originals", "--verify", "none"]
            command = [sys.executable, "-m", "fse_convert", str(make(source)), str(out), *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            output, damage = DAMAGED[name]
            damage(Path(shutil.copytree(make(output), out)))

    return make


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(release: str, folder: Callable[[str], Path], work: Path) -> Callable[[Case], dict[str, Any]]:
    """What a release makes of a case; all of its cases are answered in one process."""

    def ask() -> Any:
        cases = {
            str(case): {
                "folder": str(folder(case.folder)),
                "draft": case.draft,
                "slots": case.slots,
                "source": str(folder(case.source)),
                "rounded": case.quark and not case.draft,  # its drafter keeps FP8
            }
            for case in (*GOOD, *BAD)
        }
        path = [published(peer)] if (peer := RELEASES[release]) else []
        threads = {"OMP_NUM_THREADS": "1", "SGLANG_PLUGINS": "none"}
        return run_driver("sglang_formats_driver", folder=work, given=json.dumps(cases), path=path, **threads)

    def answer(case: Case) -> dict[str, Any]:
        found = once(work / f"formats {release}.json", ask)
        assert found["version"] == release
        return dict(found["answers"][str(case)])

    return answer


@pytest.mark.parametrize("case", GOOD, ids=lambda case: f"{case.folder} {case.draft or 'main'} {'slots' if case.slots else ''}")
def test_every_expert_has_the_values_of_the_source(loaded: Callable[[Case], dict[str, Any]], release: str, case: Case) -> None:
    answer = loaded(case)
    if case.quark and release == "0.5.21":
        assert answer.keys() == {"refused"}, "it does not read the exact names of FP8 modules"
        return
    layers, matrices = COUNTS[case.draft]
    fused = layers if case.slots and not (case.quark and case.draft) else 0
    assert (answer["model"], answer["method"]) == (MODELS[case.draft], "QuarkFusedMoEMethod" if case.quark else "Fp8MoEMethod")
    assert (answer["fused"], answer["equal"], answer["unequal"]) == (fused, matrices, [])
    assert answer["hooked"] == (None if case.quark else {"equal": matrices, "unequal": []})


@pytest.mark.parametrize(
    ("name", "matrix"),
    [("v4 fp8, a damaged weight", WEIGHT), ("v4 fp8, a damaged scale", SLOT_SCALE), ("v4 quark, a damaged weight", WEIGHT)],
)
def test_one_damaged_bit_is_seen(loaded: Callable[[Case], dict[str, Any]], release: str, name: str, matrix: str) -> None:
    answer = loaded(case := Case(name, "", slots=True))
    if case.quark and release == "0.5.21":
        assert answer.keys() == {"refused"}
    else:
        assert (answer["equal"], answer["unequal"]) == (MAIN - 1, [matrix.rpartition(".")[0]])


def test_quark_scales_typed_e8m0_are_never_loaded(loaded: Callable[[Case], dict[str, Any]], release: str) -> None:
    answer = loaded(Case("v4 quark, scales typed E8M0", "", slots=True))
    if release == "0.5.21":
        assert answer.keys() == {"refused"}
    else:
        assert (answer["fused"], answer["equal"], len(answer["unequal"])) == (LAYERS, 0, MAIN), "and nothing is said"


def test_slots_of_the_source_itself_are_rounded_at_load(loaded: Callable[[Case], dict[str, Any]], release: str) -> None:
    answer = loaded(Case("v4", "", slots=True))
    assert (answer["fused"], answer["equal"], answer["unequal"]) == (LAYERS, MAIN - len(SHARED), SHARED)
