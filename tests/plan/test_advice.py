"""What to do with a checkpoint: one true sentence per question, and a command only where it runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fse_convert.plan.advice import Advice, advise, releases, way_out
from fse_convert.plan.plan import Options
from fse_convert.servers.judge import Answer, Question, judge
from fse_convert.servers.release_names import is_since
from fse_convert.servers.targets import TARGETS, find_target
from fse_convert.servers.verdict import Outcome, because
from fse_convert.testing.memory import PROJ, Model, Tensors, expert, plans_of, subject_of
from tests.releases import NEWEST

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
V41: dict[str, Any] = {"model_type": "deepseek_v41"}
NONE = f"NVIDIA MegaMoE: no known release fuses this checkpoint as is; {NEWEST.title}: "
RUNS = "(MegaMoE refuses this width; padded it runs, the shared expert beside it)."
OLD = "SGLang 0.5.20, 0.5.21, 0.5.22 and TensorRT-LLM"
PAD = "fse-convert CHECKPOINT CHECKPOINT-megamoe-512 --target megamoe-512"


def advice(model: Model) -> Advice:
    about = model.subject()
    return advise(about, judge(about), plans_of(about, model.tensors()))


def test_a_model_without_shared_experts_has_nothing_to_fuse() -> None:
    assert advice(Model(shared="", n_shared=0)).sentences == ("No layer has a shared expert: there is nothing to fuse.",)
    tensors = Model(shared="").tensors() | {"layers.0.ffn.shared_experts.gate_up.weight": ("BF16", (8, 8))}
    about = subject_of(Model().full_config(), tensors)
    assert len(advise(about, judge(about), plans_of(about, tensors)).sentences) == 3, "what is not understood may be one"


@pytest.mark.parametrize(
    ("model", "native", "padding", "command"),
    [
        (
            Model(hidden=5120, width=2304, config=V41),
            "NVIDIA MegaMoE: vLLM >= 0.31 and SGLang >= 0.5.23 fuse this checkpoint as is.",
            f"Pad only for vLLM 0.30 (fusion turns on), or for SGLang 0.5.21 and TensorRT-LLM {RUNS}",
            PAD,
        ),
        (
            Model(hidden=5120, width=2560, config=V41),
            "NVIDIA MegaMoE: vLLM >= 0.30 and SGLang >= 0.5.23 fuse this checkpoint as is.",
            "",
            "",
        ),
        (
            Model(hidden=4096, width=2048, shared="fp8-128"),
            "NVIDIA MegaMoE: vLLM >= 0.29 and SGLang >= 0.5.22 fuse this checkpoint as is.",
            "",
            "",
        ),
        (
            Model(hidden=4096, width=2016),
            f"{NONE}routed width 2016 is no",
            f"Padding helps vLLM >= 0.29 and SGLang >= 0.5.23 (fusion turns on), and {OLD} {RUNS}",
            PAD,
        ),
        (Model(hidden=4096, width=2048, shared="bf16"), f"{NONE}the shared expert is BF16; beside MXFP4 experts", "", ""),
    ],
    ids=["v4.1", "v4.1 padded", "v4", "odd width", "bf16 shared"],
)
def test_native_advice(model: Model, native: str, padding: str, command: str) -> None:
    found = advice(model)
    assert found.sentences[0].startswith(native.removesuffix("no"))
    assert [s for s in found.sentences if s.startswith("Pad")] == [padding] * bool(padding)
    assert found.command == command


def test_each_question_has_a_sentence_that_is_true_of_it() -> None:
    """No MegaMoE for BF16 experts, while AITER and slots fuse them: each is said of its own question."""
    found = advice(Model(hidden=512, width=256, routed="bf16", shared="bf16", mtp=0))
    native, rocm, slots = found.sentences
    assert native.startswith("NVIDIA MegaMoE: no known release fuses this checkpoint as is")
    assert rocm.startswith("AMD AITER: vLLM ROCm")
    assert slots.startswith("Slots: SGLang")
    assert all("fuse this checkpoint as is." in s for s in (rocm, slots))


def test_a_model_that_no_server_runs_with_megamoe() -> None:
    tensors: Tensors = {}
    for i in range(2):
        tensors |= expert(f"model.layers.{i}.mlp.experts.0", "bf16", 128, 256, PROJ)
        tensors |= expert(f"model.layers.{i}.mlp.shared_experts", "bf16", 128, 256, PROJ)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 1, "n_shared_experts": 1}
    about = subject_of({"model_type": "glm4_moe", "num_hidden_layers": 2, "first_k_dense_replace": 0, **sizes}, tensors)
    found = advise(about, judge(about), plans_of(about, tensors))
    assert found.sentences[0] == "NVIDIA MegaMoE: no known release has a path for this model."
    assert found.sentences[1].startswith("AMD AITER: vLLM ROCm")
    assert found.sentences[2] == "Slots: no known rule covers this model."
    assert (found.fuses, found.runs, found.command) == ((), (), "")
    assert advise(about, (), plans_of(about, {})).sentences == ()


@pytest.mark.parametrize("fused", [True, False], ids=["others fuse", "none fuses"])
def test_unsafe_releases_are_named_with_the_way_out(fused: bool) -> None:
    about = Model().subject()
    unsafe = because(Outcome.UNSAFE, "x", "loads garbage", "serve with SWITCH=0")
    refused = because(Outcome.REFUSED, "y", "it refuses")

    def answer(a: Answer) -> Answer:
        if a.question is not Question.AITER:
            return a
        return replace(a, model=unsafe if a.name in ("vllm-0.30-aiter", "vllm-0.31-aiter") else a.model if fused else refused)

    answers = [answer(a) for a in judge(Model(routed="bf16", shared="bf16", mtp=0).subject())]
    sentence = advise(about, answers, lambda _: None).sentences[1]
    assert sentence.endswith("vLLM ROCm 0.30, 0.31 would fail to load it or compute wrong numbers: serve with SWITCH=0.")
    assert (f"no known release fuses this checkpoint as is; vLLM ROCm {NEWEST.release}: it refuses." in sentence) != fused


@pytest.mark.parametrize("width", [2304, 2176])
def test_a_command_is_advised_only_if_it_runs(width: int) -> None:
    """NVFP4 experts beside MXFP4 ones in the drafter: only the drafter fits the kernel, so the plain command would refuse."""
    model = Model(hidden=512, width=width, routed="nvfp4")
    tensors = model.tensors()
    for e in range(model.experts):
        tensors = {n: t for n, t in tensors.items() if not n.startswith(f"mtp.0.ffn.experts.{e}.")}
        tensors |= expert(f"mtp.0.ffn.experts.{e}", "mxfp4", width, 512)
    config = model.full_config()
    about = subject_of({**config, "quantization_config": {**config["quantization_config"], "moe_quant_algo": "NVFP4"}}, tensors)
    plans = plans_of(about, tensors)
    target = find_target("megamoe-512")
    assert target is not None
    assert plans(Options(target)) is None
    found = advise(about, judge(about), plans)
    assert found.command == "fse-convert CHECKPOINT CHECKPOINT-megamoe-512-allow-unfused --target megamoe-512 --allow-unfused"
    assert plans(Options(target, allow_unfused=True)) is not None


def test_nothing_is_advised_that_would_refuse() -> None:
    about = Model(width=384, routed="nvfp4").subject()
    found = advise(about, judge(about), lambda _: None)
    assert (found.command, found.gain) == ("", None)
    assert not [s for s in found.sentences if s.startswith("Pad")]


def test_nvfp4_that_the_server_takes_as_it_is_needs_no_padding() -> None:
    """2304 is a multiple of 256, which is what SGLang asks of NVFP4, though not of the kernel's 512."""
    assert advice(Model(hidden=512, width=2304, routed="nvfp4", mtp=0)).command == ""


@pytest.mark.parametrize("name", ["source", "my checkpoint's"])
def test_the_command_works_as_printed(name: str, made: Made, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / name
    root.symlink_to(made(layers=1))
    command = json.loads(run("inspect", root, "--json")[1])["advice"]["command"]
    program, *arguments = shlex.split(command)
    assert program == "fse-convert"
    assert arguments[:2] == [str(root), f"{name}-megamoe-512"]
    monkeypatch.chdir(tmp_path)
    assert run(*arguments)[0] == 0


def test_an_output_is_not_to_be_converted_again(made: Made, run: Run, tmp_path: Path) -> None:
    assert run(made(layers=1), tmp_path / "out", "--target", "megamoe-128")[0] == 0
    assert json.loads(run("inspect", tmp_path / "out", "--json")[1])["advice"]["command"] is None
    assert "Pad" not in run("inspect", tmp_path / "out")[1]


def test_releases_are_named_by_server() -> None:
    rows = [t for t in TARGETS if not t.is_contract]
    assert releases([t for t in rows if t.engine == "TensorRT-LLM"], rows) == "TensorRT-LLM"
    assert releases([t for t in rows if t.name in ("vllm-0.29", "vllm-0.31")], rows) == "vLLM 0.29, 0.31"
    answers = [a for a in judge(Model().subject()) if a.question is Question.AITER and not is_since(a.release, "0.34")]
    assert releases(answers, answers) == "vLLM ROCm >= 0.29, vllm-0.33-aiter-mega and vLLM ROCm >= 0.30 (fhmoe)"
    unsafe = [a for a in answers if a.name.startswith(("vllm-0.30-aiter", "vllm-0.31-aiter"))]
    assert releases(unsafe, answers) == "vLLM ROCm 0.30, 0.31 (also fhmoe)"


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ((), ""),
        (("serve with A=0, or with vLLM 0.33",), ": serve with A=0, or with vLLM 0.33"),
        (("serve with A=0, or with vLLM 0.33", "serve with A=0, or without the drafter"), ": serve with A=0"),
        (("serve with A=0", "serve with B=0"), ": serve with A=0; serve with B=0"),
    ],
    ids=["none", "one", "one way out of both", "nothing in common"],
)
def test_ways_out_that_help_against_every_reason_are_enough(hints: tuple[str, ...], said: str) -> None:
    assert way_out(hints) == said
