"""Our encoders against published ones, byte for byte: torchao 0.18, vLLM 0.33 and SGLang 0.5.23, all run on a CPU.

From MXFP4 to FP8 there is SGLang's cast, which does not check what it loses; to MXFP4 there are the three that have the rule
"even". SGLang's for CUDA and torchao's FLOOR follow other rules and must differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fse_convert.layout.mxfp4_to_fp8 import to_fp8
from fse_convert.layout.to_mxfp4 import from_floats, from_fp8
from tests.peers import values, wheels
from tests.peers.encoder_cases import E4M3, E8M0, GOLDEN, ORDINARY, TO_MXFP4, UNSAFE
from tests.peers.sglang_run import once, published, run_driver

pytestmark = pytest.mark.peers

BLOCK = (128, 128)
Encoded = tuple[Tensor, Tensor]


@pytest.fixture(scope="session")
def theirs(work: Path, python: Path) -> Callable[[str, str], Encoded]:
    """What an encoder makes of a case: bytes of weight and scale."""
    given, made = work / "encoders in.safetensors", work / "encoders out.safetensors"

    def run() -> object:
        cases = {name: case.tensors for name, case in TO_MXFP4.items()} | ORDINARY | UNSAFE
        save_file({f"{name}/{part}": t.contiguous() for name, case in cases.items() for part, t in case.items()}, given)
        package = next(python.parents[1].glob("lib/python*/site-packages/vllm"))
        path = [published(wheels.TORCHAO_0_18)]
        return run_driver("encoders_driver", given, made, package, folder=work, path=path, OMP_NUM_THREADS="1")

    versions = once(work / "encoders.json", run)
    assert versions == {"sglang": "0.5.23", "torchao": "0.18.0", "vllm": "0.33.0"}
    tensors = load_file(made)
    return lambda encoder, case: (tensors[f"{encoder}/{case}/weight"], tensors[f"{encoder}/{case}/scale"])


def ours(tensors: dict[str, Tensor]) -> Encoded:
    if "values" in tensors:
        return from_floats(tensors["values"])
    weight, scale = tensors["weight"], tensors["scale"]
    rows, columns = (n // blocks for n, blocks in zip(weight.shape, scale.shape, strict=True))
    per_group = scale.repeat_interleave(rows, 0).repeat_interleave(columns // 32, 1) if columns > 32 else scale
    return from_fp8(weight.view(torch.uint8), per_group.view(torch.uint8) if scale.dtype == E8M0 else per_group)


def without_negative_zeros(packed: Tensor) -> Tensor:
    """Code 8 as code 0, in both halves: SGLang's encoder for HIP drops the sign of a zero."""
    packed = torch.where(packed & 15 == 8, packed & 0xF0, packed)
    return torch.where(packed >> 4 == 8, packed & 15, packed)


@pytest.mark.parametrize("case", TO_MXFP4)
def test_mxfp4_is_that_of_published_encoders(theirs: Callable[[str, str], Encoded], case: str) -> None:
    weight, scale = ours(TO_MXFP4[case].tensors)
    for encoder in TO_MXFP4[case].encoders:
        their_weight, their_scale = theirs(encoder, case)
        assert torch.equal(scale, their_scale), encoder
        assert torch.equal(without_negative_zeros(weight) if encoder == "SGLang HIP" else weight, their_weight), encoder


@pytest.mark.parametrize("encoder", TO_MXFP4["golden"].encoders)
def test_golden_bytes(theirs: Callable[[str, str], Encoded], encoder: str) -> None:
    weight, scale = theirs(encoder, "golden")
    assert list(zip(scale[:, 0].tolist(), weight[:, 0].tolist(), strict=True)) == list(GOLDEN.values())


@pytest.mark.parametrize("encoder", ["torchao FLOOR", "SGLang CUDA"])
@pytest.mark.parametrize("case", ["normal", "every fp8 pair", "blocks"])
def test_other_rules_are_seen_to_differ(theirs: Callable[[str, str], Encoded], encoder: str, case: str) -> None:
    (weight, scale), (their_weight, their_scale) = ours(TO_MXFP4[case].tensors), theirs(encoder, case)
    assert 0 < int((scale != their_scale).sum()) < scale.numel()
    assert 0 < int((weight != their_weight).sum()) < weight.numel()


def as_fp8(case: dict[str, Tensor]) -> tuple[Encoded, Tensor]:
    """Our encoding of an MXFP4 matrix, and its values."""
    packed, scale = (case[part].view(torch.uint8) for part in ("weight", "scale"))
    return to_fp8(packed, scale, BLOCK), values.mxfp4(packed, scale)


def worth(encoded: Encoded) -> Tensor:
    weight, scale = encoded
    return values.block_fp8(weight.view(E4M3), scale, BLOCK)


@pytest.mark.parametrize("case", ORDINARY)
def test_fp8_is_that_of_the_published_cast(theirs: Callable[[str, str], Encoded], case: str) -> None:
    encoded, expected = as_fp8(ORDINARY[case])
    assert all(map(torch.equal, encoded, theirs("SGLang cast", case)))
    assert torch.equal(worth(encoded), expected)


@pytest.mark.parametrize("case", UNSAFE)
def test_the_published_cast_loses_what_ours_keeps(theirs: Callable[[str, str], Encoded], case: str) -> None:
    encoded, expected = as_fp8(UNSAFE[case])
    assert torch.equal(worth(encoded), expected)
    assert not torch.equal(worth(theirs("SGLang cast", case)), expected)
