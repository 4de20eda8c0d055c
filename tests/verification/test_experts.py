"""An expert as it is stored, as rows for the fused computation: whole groups of channels, a scale for each 32 columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.model.description import ExpertGroup
from fse_convert.model.formats import Format, read_format
from fse_convert.model.moe import Expert, Projection, Role
from fse_convert.verification.compare import SourceTensors
from fse_convert.verification.decode import decode_codes, decode_mxfp4, decode_scales
from fse_convert.verification.experts import StoredExpert, dequantize

HIDDEN = 64


class Held:
    """Stands for open files: every tensor is one, from offset 0."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.raw = {name: bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for name, t in tensors.items()}

    def read(self, name: str, offset: int, into: memoryview) -> memoryview:
        into[:] = self.raw[name][offset : offset + len(into)]
        return into


def stored(tensors: dict[str, tuple[str, Tensor]], width: int, block: tuple[int, int]) -> StoredExpert:
    """Make an expert of tensors by ``role.suffix``, each with its dtype."""
    infos = {
        name: TensorInfo(name, name, dtype, tuple(t.shape), 0, t.numel() * t.element_size()) for name, (dtype, t) in tensors.items()
    }
    parts = {role: {n.partition(".")[2]: i for n, i in infos.items() if n.startswith(f"{role.value}.")} for role in Role}
    formats: dict[Role, Format] = {role: read_format(held, block) for role, held in parts.items()}
    expert = Expert("expert", {role: Projection(role.value, held) for role, held in parts.items()})
    files: Any = Held({name: t for name, (_, t) in tensors.items()})
    return StoredExpert(ExpertGroup((expert,), formats, HIDDEN, width), 0, SourceTensors(files, infos, dict.fromkeys(infos, 0)))


def fp8(width: int, block: tuple[int, int], scale: str = "F8_E8M0") -> dict[str, tuple[str, Tensor]]:
    generator, tensors = torch.Generator().manual_seed(width), {}
    for role in Role:
        n, k = (HIDDEN, width) if role is Role.DOWN else (width, HIDDEN)
        codes = torch.randint(0, 0x7E, (n, k), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(120, 134, (-(-n // block[0]), -(-k // block[1])), generator=generator, dtype=torch.uint8)
        tensors[f"{role.value}.weight"] = "F8_E4M3", codes
        tensors[f"{role.value}.weight_scale_inv"] = (
            scale, exponents if scale == "F8_E8M0" else decode_scales(exponents).float(),
        )  # fmt: skip
    return tensors


@pytest.mark.parametrize("scale", ["F8_E8M0", "F32"])
@pytest.mark.parametrize(("width", "whole"), [(64, 64), (40, 64)])
def test_rows_are_the_values_and_zeros_up_to_a_whole_group(width: int, whole: int, scale: str) -> None:
    tensors = fp8(width, (32, 32), scale)
    expert = stored(tensors, width, (32, 32))
    assert expert.width == whole
    for role in Role:
        n, k = (HIDDEN, width) if role is Role.DOWN else (width, HIDDEN)
        count, columns = (HIDDEN, whole) if role is Role.DOWN else (whole, HIDDEN)
        found = dequantize(expert.rows(role, 0, count))
        by_element = tensors[f"{role.value}.weight_scale_inv"][1]
        factors = by_element.double() if scale == "F32" else decode_scales(by_element)
        expected = torch.zeros(count, columns, dtype=torch.float64)
        expected[:n, :k] = (
            decode_codes(tensors[f"{role.value}.weight"][1]) * factors.repeat_interleave(32, 0)[:n].repeat_interleave(32, 1)[:, :k]
        )
        assert torch.equal(found, expected)
        assert torch.equal(expert.values(role, 0, count), expected)
        assert torch.equal(dequantize(expert.rows(role, 32, count)), expected[32:])


def test_rows_of_mxfp4_are_e4m3() -> None:
    generator, tensors = torch.Generator().manual_seed(1), {}
    for role in Role:
        tensors[f"{role.value}.weight"] = "I8", torch.randint(0, 256, (64, 32), generator=generator, dtype=torch.uint8)
        tensors[f"{role.value}.scale"] = "F8_E8M0", torch.randint(120, 134, (64, 2), generator=generator, dtype=torch.uint8)
    expert = stored(tensors, 64, (1, 32))
    for role in Role:
        scales = decode_scales(tensors[f"{role.value}.scale"][1]).repeat_interleave(32, 1)
        expected = decode_mxfp4(tensors[f"{role.value}.weight"][1]).double() * scales
        assert torch.equal(dequantize(expert.rows(role, 0, 64)), expected)
        assert torch.equal(expert.values(role, 32, 64), expected[32:])


def test_scales_that_the_kernel_cannot_hold_are_refused() -> None:
    tensors = fp8(64, (32, 32), "F32")
    tensors["gate.weight_scale_inv"][1][1, 1] = 1.5
    expert = stored(tensors, 64, (32, 32))
    expert.rows(Role.GATE, 0, 32)
    with pytest.raises(ValueError, match="a scale is not a power of two"):
        expert.rows(Role.GATE, 32, 64)
    with pytest.raises(ValueError, match="no scale for whole groups"):
        stored(fp8(64, (16, 16)), 64, (16, 16)).rows(Role.UP, 0, 64)
