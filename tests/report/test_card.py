"""`fse-convert card`: what the section says is what the manifest states, and its commands work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import edit_manifest

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
ALONE = "Without fse-convert, any server that takes its format loads the standard layout (all files but `fse/`)."
FLAGS = "--moe-backend deep_gemm_mega_moe --enable-expert-parallel"
BASE = "deepseek-ai/DeepSeek-V4.1-Flash"


def commands(section: str) -> list[list[str]]:
    return [shlex.split(line[2:]) for line in section.splitlines() if line.startswith("$ ")]


def test_the_section_of_a_padded_checkpoint(converted: Make, run: Run) -> None:
    out = converted("vllm-0.30")
    code, section, err = run("card", out, "--base", f"hf://{BASE}@v1", "--repo", "me/V4.1-fse")
    assert (code, err.splitlines()[1:]) == (0, [f"  fse-convert verify {out}", f"  hf upload me/V4.1-fse {out}"])
    for line in (
        "## Converted by fse-convert",
        f"Base model: [{BASE}@v1](https://huggingface.co/{BASE}/tree/v1).",
        "- Experts are 512 wide instead of 384: 60 tensors padded, by channels that compute 0.",
        "- `config.json`: `text_config.moe_intermediate_size` 384 -> 512.",
        "- `fse/` is new: the shared experts of 3 of 3 MoE layers in the kernel's layout.",
        "| storage | passed: every tensor against the base model, byte for byte (106 unchanged, 60 padded, 12 in kernel layout) |",
        "| numerics | passed: 3 layers, computed from both sides, bit-equal |",
        "| kernel | not run: not asked for |",
        f"$ fse-convert verify V4.1-fse --source hf://{BASE}@v1",
        "$ hf download me/V4.1-fse --local-dir V4.1-fse",
        f"$ vllm serve V4.1-fse --tensor-parallel-size 8 --load-format fse {FLAGS}",
    ):
        assert line in section.splitlines()
    assert section.endswith(f"\n{ALONE} vLLM 0.30 fuses 3 of 3 MoE layers of it.\n")


def test_its_commands_stand_in_the_order_in_which_they_are_used(converted: Make, run: Run) -> None:
    section = run("card", converted("vllm-0.30"), "--repo", "me/V4.1-fse")[1]
    assert [words[:2] for words in commands(section)] == [
        ["hf", "download"], ["fse-convert", "verify"], ["fse-convert", "verify"], ["fse-convert", "restore"], ["vllm", "serve"],
    ]  # fmt: skip


def test_a_revision_of_the_output_is_downloaded_and_no_target_of_the_upload(converted: Make, run: Run) -> None:
    out = converted("vllm-0.30")
    _, section, err = run("card", out, "--repo", "me/V4.1-fse@v2")
    assert "\n$ hf download me/V4.1-fse --revision v2 --local-dir V4.1-fse\n" in section
    assert "\n$ fse-convert verify V4.1-fse\n" in section
    assert err.splitlines()[2] == f"  hf upload me/V4.1-fse {out}"


def test_quietly_it_prints_the_section_alone(converted: Make, run: Run) -> None:
    told, quiet = (run("card", converted("vllm-0.30"), "--repo", "me/V4.1-fse", *options) for options in ((), ("-q",)))
    assert quiet == (0, told[1], "")


def test_its_commands_work_beside_the_output(
    converted: Make, made: Make, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = converted("vllm-0.30")
    (tmp_path / out.name).symlink_to(out)
    (tmp_path / "CHECKPOINT").symlink_to(made())
    monkeypatch.chdir(tmp_path)
    section = run("card", out)[1]
    mine = [words[1:] for words in commands(section) if words[0] == "fse-convert"]
    assert [words[0] for words in mine] == ["verify", "verify", "restore"]
    for words in mine:
        assert run(*words)[0] == 0


def test_shared_experts_alone(converted: Make, run: Run) -> None:
    section = run("card", converted("vllm-0.30", "v4.1-flash", "--experts", "shared"))[1]
    assert "- `fse/` is new: the shared experts of 3 of 3 MoE layers in the kernel's layout, 512 wide." in section
    assert "padded" not in section.partition("### Proof")[0]
    assert "vLLM 0.30 fuses 0 of 3 MoE layers of it." in section


def test_a_contract_has_no_server_to_start(converted: Make, run: Run) -> None:
    section = run("card", converted("megamoe-128"))[1]
    assert section.endswith(f"### Serve\n\n{ALONE}\n")
    assert "Base model" not in section
    assert "hf download" not in section


def test_a_proof_that_was_not_asked_for(converted: Make, run: Run) -> None:
    section = run("card", converted("vllm-0.30", "v4.1-flash", "--verify", "none"))[1]
    assert re.findall(r"^\| (\w+) \| not run: not asked for \|$", section, re.MULTILINE) == ["storage", "numerics", "kernel"]


def test_formats_that_changed_for_a_server_without_a_kernel_layout(output: Make, run: Run) -> None:
    def change(value: dict[str, Any]) -> None:
        arguments = {**value["arguments"], "target": "vllm-0.33-aiter"}
        changes = [{"name": "routed-fp8", "lossless": True}, {"name": "shared-mxfp4", "lossless": False}]
        value.update(format_version=2, contract=None, layout=None, changes=changes, arguments=arguments, server=None)

    out = output("megamoe-128")
    edit_manifest(out, change)
    code, section, err = run("card", out)
    assert (code, err) == (0, "")
    assert "rewrote it offline for `vllm-0.33-aiter`." in section
    exact = (
        "- Routed experts are stored as FP8 blocks with F32 scales instead of MXFP4, every value exact (`routed-fp8`, lossless).\n"
    )
    lossy = "- Shared experts are stored as MXFP4, which rounds their values (`shared-mxfp4`, lossy: the error was not measured).\n"
    assert exact + lossy in section
    assert "kernel's layout" not in section
    assert "\n$ VLLM_ROCM_USE_AITER=1 " in section


@pytest.mark.parametrize(
    ("model_type", "needs", "size"),
    [
        ("glm5_next", "gfx950, tensor parallel size 4 or 8, data and prefill-context parallel size 1, ", 8),
        ("minimax_m3", "", 0),
    ],
)
def test_what_a_fusion_needs_of_the_machine_is_said_and_in_the_command(
    model_type: str, needs: str, size: int, output: Make, run: Run
) -> None:
    def change(value: dict[str, Any]) -> None:
        arguments = {**value["arguments"], "target": "vllm-0.33-aiter"}
        model = {**value["model"], "model_type": model_type}
        value.update(format_version=2, contract=None, layout=None, changes=[], arguments=arguments, server=None, model=model)

    out = output("megamoe-128")
    edit_manifest(out, change)
    section = run("card", out)[1]
    assert f"FUSION_SHARED_EXPERTS=1, {needs}expert parallelism must be off.\n" in section
    assert f"FUSION_SHARED_EXPERTS=1 vllm serve out{f' --tensor-parallel-size {size}' if size else ''}\n" in section


@pytest.mark.parametrize("option", ["--base", "--repo"])
def test_names_that_are_not_the_hubs(option: str, converted: Make, run: Run) -> None:
    code, _, err = run("card", converted("vllm-0.30"), option, "[x](y)/z/w")
    assert code == 2
    assert "error[usage]" in err
    assert "ORG/NAME" in err


def test_what_is_no_output_has_no_card(made: Make, run: Run) -> None:
    code, out, err = run("card", made())
    assert (code, out) == (3, "")
    assert "error[not-an-output]" in err
