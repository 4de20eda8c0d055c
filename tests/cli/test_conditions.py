"""What a fusion needs of the machine: in every form of an inspection, in the notes of a conversion, and in the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.patch import edit_config

Source = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
GLM = "gfx950, tensor parallel size 4 or 8, data and prefill-context parallel size 1, expert parallelism must be off"
REQUIRED = ("--require", "vllm-0.33-aiter")


@pytest.fixture
def glm(source: Source) -> Path:
    """A checkpoint that vLLM on ROCm fuses at some parallel sizes only."""
    root = source("v3")
    edit_config(root, lambda config: config.update(model_type="glm5_next", architectures=["Glm5NextForCausalLM"]))
    return root


@pytest.mark.parametrize("form", ["text", "markdown", "github", "junit", "json"])
def test_every_form_says_what_a_yes_depends_on(form: str, glm: Path, run: Run) -> None:
    code, out, _ = run("inspect", glm, *REQUIRED, "--format", form)
    assert code == 0
    shown = " ".join(out.split())
    assert "aiter-conditions" in shown
    assert f"vLLM fuses GLM-5-Next only under these conditions: {GLM}" in shown
    assert "tp-unfused" not in shown


@pytest.mark.parametrize(("tp", "size", "told"), [(2, 8, True), (4, 4, False)])
def test_a_size_that_does_not_fuse_is_told_and_never_the_next_step(tp: int, size: int, told: bool, glm: Path, run: Run) -> None:
    code, out, err = run("inspect", glm, *REQUIRED, "--tp", tp)
    said = f"note[tp-unfused]: --tp: vLLM ROCm >= 0.32 fuse this model at tensor-parallel size 4 or 8 only, not at {tp}"
    assert (code, said in " ".join(out.split())) == (0, told)
    assert err.endswith(f"FUSION_SHARED_EXPERTS=1 vllm serve {glm} --tensor-parallel-size {size}\n")


def test_a_conversion_says_it_too(glm: Path, run: Run, tmp_path: Path) -> None:
    code, _, err = run(glm, tmp_path / "out", "--target", "vllm-0.33-aiter", "--tp", 3)
    assert code == 0
    assert GLM in err
    assert "note[tp-unfused]: --tp: vLLM ROCm fuses this model at tensor-parallel size 4 or 8 only, not at 3\n" in err
    assert " --tensor-parallel-size 8\n" in err
