"""A change of format from `inspect` to `restore`: what is offered, whether the printed command does it, and what is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.plan.advice import REQUANTISED
from fse_convert.testing.patch import poke
from tests.releases import SLOTS

Run = Callable[..., tuple[int, str, str]]
Make = Callable[..., Path]
Digest = Callable[[Path], dict[str, str]]
KINDS = ("v4-flash", "v4.1-flash", "v4-pro", "v4-flash-fp8", "kimi-k2-quark", "glm-4.5-quark", "qwen3.5-quark")


def inspected(run: Run, folder: Path, *options: str) -> Any:
    """What `inspect --json` says of a folder."""
    code, out, _ = run("inspect", folder, "--json", *options)
    assert code == 0
    return json.loads(out)


def notes(report: Any, target: str) -> set[str]:
    """The codes of what is to be known of a target's answer."""
    (answer,) = [answer for answer in report["targets"] if answer["target"] == target]
    return {note["code"] for note in answer["notes"]}


def outcomes(report: Any, target: str) -> dict[str, str]:
    """The verdict of a target by layer."""
    (answer,) = [answer for answer in report["targets"] if answer["target"] == target]
    return {layer: outcome for outcome, layers in answer["layers"].items() for layer in layers}


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_that_is_offered_does_what_is_said_of_it(
    kind: str, made: Make, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root = made(kind, width=256)
    before = inspected(run, root)
    for number, offer in enumerate(before["offers"]):
        out, back = tmp_path / f"out{number}", tmp_path / f"back{number}"
        _, place, _, *options = shlex.split(offer["command"])
        assert run(place, out, *options, "-q")[0] == 0
        after = inspected(run, out)
        grown = after["checkpoint"]["bytes"] - before["checkpoint"]["bytes"]
        assert grown == offer["bytes"]
        for target in offer["targets"]:
            verdicts = outcomes(after, target)
            assert not notes(after, target) & REQUANTISED
            drafter = {layer["name"] for layer in after["layers"] if layer["kind"] == "mtp"}
            assert {verdict for layer, verdict in verdicts.items() if layer not in drafter} == {"fused"}
            assert outcomes(before, target) != verdicts or notes(before, target) & REQUANTISED
            of_drafter = {verdicts[layer] for layer in drafter}
            assert of_drafter <= ({"unsafe"} if "fails" in offer["drafter"] else {"fused", "unfused"})
        assert run("verify", out, "--source", root)[0] == 0
        assert run("restore", out, back)[0] == 0
        assert digest(back) == digest(root)
    assert before["offers"]


def test_what_one_way_of_starting_a_server_reads_rightly_is_offered_and_served_so(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4.1-flash", width=768), tmp_path / "out"
    (offer,) = inspected(run, root)["offers"]
    assert offer["targets"] == SLOTS[SLOTS.index("sglang-0.5.23-slots") :]
    needs = "--enforce-shared-experts-fusion, --moe-a2a-backend none, CUDA, no expert parallelism"
    lost = "vLLM >= 0.31 and SGLang >= 0.5.23 would no longer fuse it. vLLM could no longer serve it."
    assert f"{lost} Right only with {needs}." in " ".join(run("inspect", root)[1].split())
    code, _, err = run(root, out, *shlex.split(offer["command"])[3:])
    assert code == 0
    flags = "--enforce-shared-experts-fusion --moe-a2a-backend none"
    assert f"  python -m sglang.launch_server --model-path {out} --tp 8 {flags}\n" in err
    assert "note[sglang-block-32]" in err
    code, text, err = run("inspect", out, "--require", "sglang-0.5.23-slots")
    assert code == 0
    assert f"  python -m sglang.launch_server --model-path {out} --tp 8 {flags}\n" in err
    assert "AMD AITER: no known release fuses this checkpoint as is. vLLM ROCm >= 0.30 would fail" in text
    assert f"--tp 8 {flags}\n" in run("card", out)[1]
    ranks = " ".join(run("inspect", out, "--tp", 8)[1].split())
    assert "TP 8: vLLM does not serve this model in FP8 at any width: routed experts, 96 wide per rank; does not" in ranks
    assert "TP 8: SGLang loads routed experts, 96 wide per rank, a multiple of 32" in ranks


def test_what_v4_pro_lacks_for_the_heterogeneous_kernel_is_offered_and_nothing_to_other_sizes(made: Make, run: Run) -> None:
    root = made("v4-pro", layers=1, experts=384, hidden=7168, width=3072, sparse=True)  # without expert_dtype, as published
    offers = [o for o in inspected(run, root)["offers"] if "vllm-0.33-aiter-fhmoe" in o["targets"]]
    assert [(o["does"], o["bytes"]) for o in offers] == [(["writes expert_dtype fp4 in the place where servers read it"], 0)]
    code, text, _ = run(root, "out", *shlex.split(offers[0]["command"])[3:], "--dry-run", "--json")
    assert code in (0, 4), text  # 4: no room for 12 GiB here
    assert {layer["kind"]: layer["verdict"] for layer in json.loads(text)["layers"]} == {"decoder": "fused", "mtp": "unfused"}
    text = run("inspect", made("v4-flash", width=256))[1]
    sentence = "No change of format is known to give this checkpoint the kernel of vLLM ROCm >= 0.30 (fhmoe): n_routed_experts"
    assert sentence in " ".join(text.split())


@pytest.mark.parametrize("options", [("--routed", "fp8"), ("--shared", "mxfp4", "--lossy")])
def test_the_gate_of_amd_passes_what_is_served_without_the_drafter(
    options: tuple[str, ...], made: Make, tmp_path: Path, run: Run
) -> None:
    root, out, gate = made("v4-flash", width=256), tmp_path / "out", ("--require", "vllm-0.33-aiter")
    assert run(root, out, *options, "-q")[0] == 0
    code, text, _ = run("inspect", out, *gate)
    assert code == 1
    assert "Only the drafter's layers do not in vllm-0.33-aiter: --without-drafter leaves them out." in " ".join(text.split())
    code, text, err = run("inspect", out, *gate, "--without-drafter")
    assert code == 0
    assert "Passed: every layer fuses in vllm-0.33-aiter." in text
    assert "note[drafter-left-out]" in text
    assert "mtp.0" not in text
    assert "  VLLM_ROCM_USE_AITER=1 " in err
    code, text, _ = run("inspect", root, *gate, "--without-drafter")
    assert code == 1, "its decoder layers do not fuse"
    assert "Only the drafter" not in text
    assert "note[drafter-left-out]" not in run("inspect", made("bf16", mtp=0), "--without-drafter")[1]


def test_a_loss_is_permitted_by_name_only(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("kimi-k2-quark", width=256), tmp_path / "out"
    code, _, err = run(root, out, "--target", "vllm-0.33-aiter")
    assert code == 3
    assert "error[lossy]" in err
    assert "--lossy permits it" in err
    code, _, err = run(root, out, "--shared", "mxfp4")
    assert code == 3
    assert "error[lossy]" in err
    assert not out.exists()
    assert run(root, out, "--target", "vllm-0.33-aiter", "--lossy", "-q")[0] == 0


def test_what_nothing_helps_is_refused_with_the_server_s_own_reason(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4.1-flash"), tmp_path / "out"
    code, _, err = run(root, out, "--target", "vllm-0.33-aiter", "--lossy")
    assert code == 3
    assert "error[no-change-helps]" in err
    assert "error[aiter-deepseek-not-quark-mxfp4]" in err
    assert run(root, out, "--target", "vllm-0.33-aiter", "--lossy", "--allow-unfused", "-q")[0] == 0
    assert (out / "config.json").read_bytes() == (root / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("kind", "options", "code"),
    [
        ("kimi-k2-quark", ("--routed", "fp8"), "routed-fp8-unfit"),
        ("v4-flash-fp8", ("--routed", "fp8"), "routed-fp8-unfit"),
        ("v4-flash-fp8", ("--shared", "mxfp4", "--lossy"), "shared-mxfp4-unfit"),
        ("quark-mxfp4", ("--shared", "mxfp4", "--lossy"), "shared-mxfp4-unfit"),
        ("v4-flash", ("--routed", "fp8", "--tp", "8"), "changes-combined"),
    ],
)
def test_a_change_that_does_not_fit_says_why(
    kind: str, options: tuple[str, ...], code: str, made: Make, tmp_path: Path, run: Run
) -> None:
    exit_code, _, err = run(made(kind, width=320 if "--tp" in options else 256), tmp_path / "out", *options)
    assert exit_code == 3
    assert f"error[{code}]" in err
    assert not (tmp_path / "out").exists()


def test_a_change_by_name_says_who_fuses_the_output(made: Make, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made("v4-flash", width=256), tmp_path / "out", "--routed", "fp8", "--dry-run")
    assert code == 0
    assert "note[output-served]: of the output: " in err
    assert "vLLM ROCm >= 0.30" in err
    assert "fuse its decoder layers, and not the drafter" in err
    assert "Slots: SGLang >= 0.5.20 and ATOM fuse this checkpoint as is" in err
    assert "note[fp8-fits]: the scales of all " in err
    code, out, _ = run(made("v4-flash", width=256), tmp_path / "out", "--routed", "fp8", "--dry-run", "--json")
    assert json.loads(out)["target"] is None
    (change,) = json.loads(out)["changes"]
    assert (change["name"], change["lossless"]) == ("routed-fp8", True)


def test_defects_are_mended_for_no_server_in_particular(made: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = made("v4-flash-fp8", width=256), tmp_path / "out"
    code, text, _ = run("inspect", root)
    assert code == 0
    assert "--heal" in text
    assert run(root, out, "--heal", "-q")[0] == 0
    assert run("verify", out, "--source", root)[0] == 0
    assert run("restore", out, tmp_path / "back")[0] == 0
    assert digest(tmp_path / "back") == digest(root)
    mended = "- A defect of `config.json` or of labels was mended, no value of the model changed (`heal-fp8-scales`, lossless)."
    assert mended in run("card", out)[1]
    code, _, err = run(made("v4-flash", width=256), tmp_path / "none", "--heal")
    assert code == 3
    assert "error[nothing-to-heal]" in err


@pytest.mark.parametrize("options", [("--routed", "fp8"), ("--target", "vllm-0.33-aiter")])
def test_a_change_of_format_at_a_size_that_needs_padding_names_one_that_does_not(
    options: tuple[str, ...], made: Make, tmp_path: Path, run: Run
) -> None:
    root, out = made("v4-flash", width=384), tmp_path / "out"
    code, _, err = run(root, out, *options, "--tp", "12")
    assert code == 3
    assert "error[changes-combined]" in err
    assert "--tp 3 needs no padding" in err
    assert run(root, out, *options, "--tp", "3", "--dry-run")[0] == 0


def test_two_recodings_exclude_each_other(made: Make, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made("v4-flash", width=256), tmp_path / "out", "--routed", "fp8", "--shared", "mxfp4", "--lossy")
    assert code == 3
    assert "error[changes-combined]" in err


def test_a_contract_has_no_format(made: Make, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made("v4-flash", width=256), tmp_path / "out", "--routed", "fp8", "--target", "megamoe-128")
    assert code == 2
    assert "error[contract-format]" in err


@pytest.mark.parametrize("name", ["layers.1.ffn.experts.1.w1.weight", "layers.0.ffn.shared_experts.w2.weight"])
def test_a_nan_in_a_copied_expert_is_the_source_s_damage(name: str, source: Make, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash-fp8", width=256)
    poke(root, name, 7, b"\x7f")
    code, _, err = run(root, tmp_path / "out", "--heal")
    assert code == 3
    assert "error[nan]" in err
    assert name in err
    assert not (tmp_path / "out").exists()


def test_an_expert_that_overflows_in_servers_is_no_mismatch(source: Make, tmp_path: Path, run: Run) -> None:
    root, out = source("v4-flash", width=256, layers=1), tmp_path / "out"
    poke(root, "layers.0.ffn.shared_experts.w1.scale", 0, b"\xfe" * 4)
    code, text, _ = run(root, out, "--routed", "fp8")
    assert code == 0
    assert "  note: layers.0.ffn.shared_experts: the kernel's bytes and the source's compute the same bits; it overflows or" in text
    assert run("verify", out, "--source", root, "--json")[0] == 0


@pytest.mark.parametrize("byte", [0, 255])
def test_scales_that_f32_cannot_hold_are_told_by_a_dry_run(byte: int, source: Make, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", width=256)
    poke(root, "layers.0.ffn.shared_experts.w1.scale", 1, bytes([byte]))
    code, _, err = run(root, tmp_path / "out", "--routed", "fp8", "--dry-run")
    assert code == 3
    assert f"error[{'nan' if byte else 'scale-range'}]" in err


@pytest.mark.parametrize(
    "options", [("--routed", "fp8"), ("--shared", "mxfp4", "--lossy"), ("--routed", "fp8", "--drop-originals")]
)
def test_a_card_says_what_was_changed(options: tuple[str, ...], made: Make, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run(made("v4-flash", width=256), out, *options, "-q")[0] == 0
    code, text, _ = run("card", out)
    assert code == 0
    assert ("measured, not bit-equal" in text) == ("--lossy" in options)
    assert ("(`shared-mxfp4`, lossy: relative L2 of a matrix at most 0.1" in text) == ("--lossy" in options)
    assert ("fse-convert restore" in text) == ("--drop-originals" not in options)


def test_originals_may_be_left_out(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4-flash", width=256), tmp_path / "out"
    assert run(root, out, "--routed", "fp8", "--drop-originals", "-q")[0] == 0
    assert not list(out.glob("fse/original-*"))
    assert run("verify", out, "--source", root)[0] == 0
    code, _, err = run("restore", out, tmp_path / "back")
    assert code == 3
    assert "error[originals-dropped]" in err
    assert not (tmp_path / "back").exists()


def test_a_server_that_fuses_the_source_gets_a_copy(made: Make, tmp_path: Path, run: Run) -> None:
    root, out = made("v4-flash", width=256), tmp_path / "out"
    assert run(root, out, "--target", "sglang-0.5.23-slots", "-q")[0] == 0
    manifest = json.loads((out / "fse" / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["contract"], manifest["layout"]) == (2, None, None)
    assert "changes" not in manifest
    for shard in root.glob("*.safetensors"):
        assert (out / shard.name).read_bytes() == shard.read_bytes()
