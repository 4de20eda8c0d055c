"""What scales alone tell before any work: that every weight is exact in FP8, or which ones their elements must decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.testing.patch import poke

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("byte", "code"), [(120, "fp8-fits"), (127 + 60, "fp8-open"), (90, "fp8-low")])
def test_scales_say_before_any_work_whether_weights_fit(byte: int, code: str, source: Make, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", width=256)
    poke(root, "layers.0.ffn.experts.0.w1.scale", 0, bytes([byte]))
    exit_code, _, err = run(root, tmp_path / "out", "--routed", "fp8", "--dry-run")
    assert exit_code == 0
    assert f"note[{code}]" in err
    assert ("layers.0.ffn.experts.0.w1" in err) == (code != "fp8-fits")


def test_what_does_not_fit_is_refused_with_its_place_and_nothing_appears(source: Make, tmp_path: Path, run: Run) -> None:
    root, out = source("v4-flash", width=256), tmp_path / "out"
    poke(root, "layers.1.ffn.experts.2.w2.scale", 3, bytes([170]))
    code, _, err = run(root, out, "--routed", "fp8")
    assert code == 3
    assert "error[tile-span]" in err
    assert "layers.1.ffn.experts.2.w2.weight" in err
    assert not out.exists()
