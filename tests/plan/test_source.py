"""F32 scales, read without torch: the same answers as the layout's own rule, in `convert` and at the gate alike."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.layout import ue8m0
from fse_convert.plan.source import CHUNK, inexact_value, read_stated_widths
from fse_convert.testing.memory import NoFolder
from fse_convert.testing.patch import poke

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
ROUTED = "layers.1.ffn.experts.2.w2.scale"
ONE_AND_A_HALF = b"\0\0\xc0\x3f"


class Bytes(NoFolder):
    """A folder with one file."""

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.raw[offset:][:length]


def told(raw: bytes) -> str:
    return inexact_value(TensorInfo("scale", "shard", "F32", (len(raw) // 4,), 0, len(raw)), Bytes(b"12345678" + raw), 8)


@pytest.mark.parametrize(
    "value", [0x3F800000, 0x00800000, 0x7F000000, 0, 0x80000000, 0xBF800000, 0x3FC00000, 1, 0x7F800000, 0x7FC00000]
)
def test_one_value_is_judged_as_the_layout_does(value: int) -> None:
    raw = struct.pack("<I", value)
    try:
        ue8m0.from_fp32(torch.frombuffer(bytearray(raw), dtype=torch.float32))
        expected = ""
    except ValueError as e:
        expected = str(e)
    assert told(raw) == expected


def test_the_first_bad_value_is_named_wherever_it_is() -> None:
    count = CHUNK // 4 + 7
    raw = bytearray(struct.pack("<f", 0.25) * count)
    assert told(bytes(raw)) == ""
    raw[4 * (count - 2) : 4 * (count - 1)] = ONE_AND_A_HALF
    assert told(bytes(raw)) == f"scale {count - 2} is 1.5, not a power of two that E8M0 can hold"


def test_a_file_that_ends_early_is_no_scale() -> None:
    with pytest.raises(EOFError):
        inexact_value(TensorInfo("scale", "shard", "F32", (4,), 0, 16), Bytes(b"1234"), 0)


@pytest.mark.parametrize(
    ("text", "found"), [(b'{"moe_inter_dim": 384}', {"a.json": 384}), (b'{"moe_inter_dim": "x"}', {}), (b'["moe_inter_dim"', {})]
)
def test_widths_that_small_files_state(text: bytes, found: dict[str, int]) -> None:
    folder = Bytes(text)
    folder.files = {"a.json": len(text), "b.txt": 1}
    assert read_stated_widths(folder.files, folder) == found


def test_the_gate_passes_exact_f32_scales_and_no_others(source: Made, run: Run) -> None:
    root = source("v4-flash-base")
    assert run("inspect", root, "--require", "megamoe-128")[0] == 0
    poke(root, ROUTED, 0, ONE_AND_A_HALF)
    code, _, err = run("inspect", root, "--require", "megamoe-128")
    assert code == 1
    assert "scale-inexact" in err


def test_the_gate_sees_shared_scales_without_torch(source: Made) -> None:
    root = source("v4-flash-base")
    poke(root, "layers.0.ffn.shared_experts.w1.scale", 0, ONE_AND_A_HALF)
    call = f"import sys; from fse_convert.cli import main\ntry: main(['inspect', {str(root)!r}, '--require', 'megamoe-128'])\n"
    call += "except SystemExit as e: print(e.code, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "1 False"


def test_unread_scales_are_an_objection(source: Made, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    from fse_convert import inspection
    from fse_convert.servers.f32_scales import UNREAD

    monkeypatch.setattr(inspection, "_scales", lambda *_, **__: UNREAD)
    code, _, err = run("inspect", source("v4-flash-base"), "--require", "megamoe-128")
    assert code == 1
    assert "scale-f32-unread" in err


def test_routed_scales_are_checked_before_anything_is_written(source: Made, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash-base")
    for layer in ("layers.0", "layers.1", "mtp.0"):
        poke(root, f"{layer}.ffn.experts.0.w2.scale", 4, ONE_AND_A_HALF)
    code, _, err = run(root, tmp_path / "out")
    assert code == 3
    assert "layers.0.ffn.experts.0.w2.scale: scale 1 is 1.5" in err
    assert not (tmp_path / "out").exists()


def test_inexact_scales_of_a_whole_model_are_one_error(made: Made, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made("v4-flash-base", power_of_two=False), tmp_path / "out")
    assert code == 3
    errors = [line.split(":")[0] for line in err.splitlines() if line.startswith("error")]
    assert errors == ["error[not-fusable]", "error[scale-inexact]"]
    assert "F32 scales are not powers of two in 3 layers, e.g. layers.0.ffn.shared_experts.w1.scale: scale 0 is" in err
