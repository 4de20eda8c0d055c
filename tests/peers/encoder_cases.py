"""Matrices for published encoders: every code, ties and their neighbours, zeros, extremes; and which encoders are held to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fse_convert.layout.to_mxfp4 import from_floats

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
HALF, ONE, ONE_AND_HALF, THREE = 1, 2, 3, 5  # codes of MXFP4
_random = torch.Generator().manual_seed(20)


class Case(NamedTuple):
    """The tensors that an encoder is given, by name, and the published encoders that follow the rule there."""

    tensors: dict[str, Tensor]
    encoders: tuple[str, ...]


def uniform(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=_random, dtype=torch.uint8)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_random)


def floats(values_nk: Tensor, dtype: torch.dtype, *encoders: str) -> Case:
    return Case({"values": values_nk.to(dtype)}, encoders)


def every_fp8_pair(scale: int, *encoders: str) -> Case:
    """Every E4M3 code, of both signs, in a group of which every code that is not smaller is the largest; one scale byte."""
    rows = []
    for largest in range(127):
        codes = [code | sign for code in range(largest + 1) for sign in (0, 128)]
        rows += [[largest, *codes[i : i + 31]] for i in range(0, len(codes), 31)]
    weight = torch.tensor([row + [0] * (32 - len(row)) for row in rows], dtype=torch.uint8)
    return Case({"weight": weight.view(E4M3), "scale": torch.full((len(rows), 1), scale, dtype=torch.uint8).view(E8M0)}, encoders)


def fp8_blocks(scale: Tensor, *encoders: str) -> Case:
    weight = uniform(0, 127, 256, 256) | (uniform(0, 2, 256, 256) << 7)
    return Case({"weight": weight.view(E4M3), "scale": scale}, encoders)


def ties(neighbour: float) -> Tensor:
    """All middles between neighbouring codes, and what is next to them, under every largest code and at its own edges."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    close = torch.cat([middles * factor for factor in (1, 1 - neighbour, 1 + neighbour)])
    largest = [top * factor for top in (4, 5, 6, 7, 3.5, 1.75) for factor in (1, 1 - neighbour, 1 + neighbour)]
    groups = torch.stack([torch.cat((torch.tensor([top, -top]), close, torch.zeros(9))) for top in largest])
    return torch.cat([sign * groups * 2.0**e for e in (-100, -3, 0, 60) for sign in (1, -1)])


def of_exponents(*exponents: int) -> Tensor:
    """Groups whose greatest magnitudes are 1.7 times these powers of two."""
    groups = normal(len(exponents), 32)
    return groups / groups.abs().amax(1, keepdim=True) * 1.7 * torch.exp2(torch.tensor(exponents, dtype=torch.float64))[:, None]


ALL = ("torchao EVEN", "vLLM", "SGLang HIP")
GOLDEN = {  # the first two values of a group of zeros -> scale byte, first byte
    (6, 3): (127, 0x57),
    (7, 3): (128, 0x36),
    (6.5, 2.5): (127, 0x47),
    (3.5, -3.5): (127, 0xE6),
    (1.75, -0.25): (126, 0x96),
    (-5, 0.75): (127, 0x2E),
    (5, 1.25): (127, 0x26),
}
TO_MXFP4 = {
    "golden": floats(torch.tensor([[*pair, *[0.0] * 30] for pair in GOLDEN]), torch.bfloat16, *ALL),
    "normal": floats(0.02 * normal(64, 256), torch.bfloat16, *ALL),
    "heavy tails": floats(normal(64, 256) ** 3, torch.bfloat16, *ALL),
    "sparse": floats(normal(64, 256) * (uniform(0, 16, 64, 256) == 0), torch.bfloat16, *ALL),
    "ties": floats(ties(2**-7), torch.bfloat16, *ALL),
    "zeros": floats(torch.tensor([[0.0] * 64, [-0.0] * 64, [*[0.0] * 33, -0.0, 1.0, *[0.0] * 29]]), torch.bfloat16, *ALL),
    "every fp8 pair": every_fp8_pair(127, *ALL),
    "every fp8 pair, small": every_fp8_pair(12, *ALL),
    "every fp8 pair, large": every_fp8_pair(245, *ALL),
    "blocks": fp8_blocks(uniform(100, 140, 2, 2).view(E8M0), *ALL),
    # vLLM's takes no F32, and BF16 does not hold these.
    "normal, F32": floats(0.02 * normal(64, 256), torch.float32, "torchao EVEN", "SGLang HIP"),
    "ties, F32": floats(ties(2**-23), torch.float32, "torchao EVEN", "SGLang HIP"),
    "blocks, F32 scales": fp8_blocks(torch.rand(2, 2, generator=_random) * 1e-3, "torchao EVEN", "SGLang HIP"),
    # Near the ends of F32 the others flush or overflow.
    "subnormal": floats(of_exponents(*range(-133, -121)), torch.bfloat16, "SGLang HIP"),
    "every fp8 pair, least": every_fp8_pair(11, "SGLang HIP", "vLLM"),
    "every fp8 pair, greatest": every_fp8_pair(246, "torchao EVEN"),
}


def mxfp4(codes_nk: Tensor, scale_ng: Tensor) -> dict[str, Tensor]:
    packed = codes_nk[:, ::2] | (codes_nk[:, 1::2] << 4)
    return {"weight": packed.view(torch.int8), "scale": scale_ng.view(E8M0)}


def of_normal(deviation: float) -> dict[str, Tensor]:
    weight, scale = from_floats(deviation * normal(256, 256))
    return {"weight": weight.view(torch.int8), "scale": scale.view(E8M0)}


def two_exponents(low: int, high: int, small: int, large: int) -> dict[str, Tensor]:
    """A tile of groups with one exponent byte and code ``small``, but for one group of the other and of code ``large``."""
    codes, scale = torch.full((128, 128), small, dtype=torch.uint8), torch.full((128, 4), low, dtype=torch.uint8)
    codes[5, 32:64], scale[5, 1] = large, high
    return mxfp4(codes, scale)


ORDINARY = {
    "normal, 0.02": of_normal(0.02),
    "normal, 1e-6": of_normal(1e-6),
    "normal, 30": of_normal(30),
    "every code, span 14": mxfp4(uniform(0, 16, 256, 512), uniform(110, 125, 256, 16)),
    "codes of 1 and more, span 15": mxfp4(uniform(0, 6, 256, 128) + ONE, uniform(110, 125, 256, 4)),
}
UNSAFE = {
    "a group of zeros 16 above": two_exponents(104, 120, ONE_AND_HALF, 0),
    "span 15 with codes that leave room": two_exponents(105, 120, HALF, THREE),
}
"""What the published cast loses values of, and one scale a tile can hold exactly."""
