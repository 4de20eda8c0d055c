"""Outputs judged by the safetensors library, by padding written out here, and by the layout functions that other tests judge."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open

from fse_convert.layout import ue8m0
from fse_convert.testing.patch import read_header
from tests.layout import tensors

EXPERT = re.compile(r"(.*)\.(experts\.\d+|shared_experts)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(\w+)")


def load(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's shards as raw bytes ``[..., row bytes]``, by the library; a name that occurs twice fails."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a mapping
                assert name not in tensors
                tensor = f.get_tensor(name)
                tensors[name] = tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
    return tensors


def fill_of(name: str, tensor: torch.Tensor, dtype: str) -> bytes:
    if not name.rsplit(".", maxsplit=1)[-1].startswith(("scale", "weight_scale")):
        return b"\0\0" if dtype == "BF16" else b"\0"
    return {"F32": b"\0\0\x80\x3f", "F8_E4M3": b"\x38"}.get(dtype, b"\x7f")


def expected(name: str, tensor: torch.Tensor, old: int, new: int, dtype: str) -> torch.Tensor:
    """Pad as the design says, from the name and the sizes alone: gate and up at the end of rows, down at the end of columns."""
    m = EXPERT.fullmatch(name)
    if m is None or tensor.ndim < 2 or m[4] in ("weight_scale_2", "input_scale"):
        return tensor
    down = m[3] in ("w2", "down_proj")
    rows, row_bytes = tensor.shape
    fill = torch.tensor(list(fill_of(name, tensor, dtype)), dtype=torch.uint8)
    if down:
        width = len(fill)
        columns = row_bytes // width
        per = next(b for b in (1, 2, 16, 32, 128) if -(-old // b) == columns)
        new_bytes = -(-new // per) * width
        tail = fill.repeat(rows * (new_bytes - row_bytes) // width).view(rows, -1)
        return torch.cat((tensor, tail), 1)
    block = next(b for b in (1, 32, 128) if -(-old // b) == rows)
    new_rows = -(-new // block)
    return torch.cat((tensor, fill.repeat((new_rows - rows) * row_bytes // len(fill)).view(-1, row_bytes)))


def dtypes(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in root.glob("*.safetensors"):
        header, _ = read_header(path)
        found |= {n: e["dtype"] for n, e in header.items() if n != "__metadata__"}
    return found


def check_standard(root: Path, out: Path, old: int, new: int, shared: int = 1) -> int:
    """Compare the standard layout of OUT with the padding written out here; returns how many tensors grew."""
    source, result, kinds = load(root), load(out), dtypes(root)
    assert source.keys() == result.keys()
    assert kinds == dtypes(out)
    grown = 0
    for name, tensor in source.items():
        n = shared if ".shared_experts." in name else 1
        want = expected(name, tensor, n * old, n * new, kinds[name]) if old != new else tensor
        assert torch.equal(result[name], want), name
        grown += want.shape != tensor.shape
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() for t in result.values())
    assert set(index["weight_map"]) == set(result)
    assert {p.name for p in out.glob("*.safetensors")} == set(index["weight_map"].values())
    return grown


def check_kernel(root: Path, out: Path, width: int, shared: int = 1) -> int:
    """Compare ``fse/`` with the layout functions that tests/layout and tests/peers judge; returns how many layers it has."""
    source, kinds = load(root), dtypes(root)
    kernel = load(out / "fse")
    (wire,) = (n for n, t in kernel.items() if not t.numel())
    assert wire in source, "a tensor of the model with no element stops loaders that take fse/ for a checkpoint"
    layers = sorted({n.rsplit(".", 1)[0] for n in kernel} - {wire.rpartition(".")[0]})
    size = shared * width
    for layer in layers:
        prefix = layer.removesuffix(".experts") + ".shared_experts."
        names = ("w1", "w3", "w2") if prefix + "w1.weight" in source else ("gate_proj", "up_proj", "down_proj")
        weights, scales = [], []
        for p in names:
            weight = source[f"{prefix}{p}.weight"]
            name = next(n for n in source if n.startswith(f"{prefix}{p}.") and "scale" in n)
            scale = source[name]
            if kinds[name] == "F32":
                scale = ue8m0.from_fp32(scale.view(torch.float32))
            (n, k), (sn, sk) = weight.shape, scale.shape
            block = next(b for b in (32, 128) if (-(-n // b), -(-k // b)) == (sn, sk))
            scale = ue8m0.expand(scale, n, k, block, block)
            n2, k2 = (n, size) if p in ("w2", "down_proj") else (size, k)
            weights.append(torch.nn.functional.pad(weight, (0, k2 - k, 0, n2 - n)))
            scales.append(torch.nn.functional.pad(scale, (0, k2 // 32 - scale.shape[1], 0, n2 - n), value=127))
        got = {p: kernel[f"{layer}.shared_{p}"] for p in ("l1_weight", "l1_weight_scale", "l2_weight", "l2_weight_scale")}
        assert torch.equal(got["l1_weight"], tensors.interleave(*weights[:2]))
        assert torch.equal(got["l1_weight_scale"], tensors.l1_scale(*scales[:2]).view(torch.uint8))
        assert torch.equal(got["l2_weight"], weights[2])
        assert torch.equal(got["l2_weight_scale"], tensors.l2_scale(scales[2]).view(torch.uint8))
    return len(layers)
