"""Costs in bytes against published figures: consumers.md section 0 and 2.3, computed for the real DeepSeek checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import open_checkpoint
from fse_convert.errors import size
from fse_convert.model.description import Description
from fse_convert.model.moe import LayerKind
from fse_convert.plan.costs import Serving, costs, padding, stored
from fse_convert.plan.source import describe_source
from fse_convert.plan.width_rounding import contract_widths
from fse_convert.servers.native import LaunchWidths
from fse_convert.servers.subject import Subject
from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.memory import Model

GIB = 2**30
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """All 96,085 headers of V4.1-Flash; the values are a hole in the file."""
    root = make_checkpoint(tmp_path_factory.mktemp("v41") / "source", "v4.1-flash", real=True, sparse=True)
    return describe_source(open_checkpoint(LocalFolder(root))).subject


@pytest.fixture(scope="module")
def v41(subject: Subject) -> Description:
    """What they describe."""
    return subject.description


def both(width: int) -> LaunchWidths:
    """One routed and one shared expert of a width."""
    return LaunchWidths(width, width)


def test_widths_of_v41(subject: Subject) -> None:
    assert contract_widths(subject, tp=1) == {"megamoe-512": both(2560), "megamoe-128": both(2304)}
    assert contract_widths(subject, tp=8) == {"megamoe-512": both(2560), "megamoe-128": both(2304)}
    assert contract_widths(subject, tp=16) == {"megamoe-512": both(2560), "megamoe-128": both(2560)}


@pytest.mark.parametrize(("ep", "native", "delta"), [(1, 268.95, 29.88), (4, 67.24, 7.47), (8, 33.62, 3.74), (16, 16.81, 1.87)])
def test_routed_experts_of_v41s_decoder_per_rank(v41: Description, ep: int, native: float, delta: float) -> None:
    found = costs(v41, Serving(ep=ep), {"megamoe-512": both(2560), "megamoe-128": both(2304)})
    assert found.decoder.routed / ep / GIB == pytest.approx(native, abs=0.005)
    assert found.paddings["megamoe-512"].decoder.routed / ep / GIB == pytest.approx(delta, abs=0.005)
    assert list(found.paddings) == ["megamoe-512"]


def test_padding_v41_on_disk(v41: Description) -> None:
    found = padding(v41, both(2560))
    assert found.decoder.routed / GIB == pytest.approx(29.9, abs=0.05)
    assert found.decoder.routed == 40 * 384 * 3 * 256 * 5120 * (1 / 2 + 1 / 32)
    assert found.decoder.shared == 40 * 3 * (256 * 5120 + 8 * 160)
    assert found.mtp.routed == 3 * 128 * 3 * 256 * 5120 * (1 / 2 + 1 / 32)
    assert found.disk == found.decoder.total + found.mtp.total
    assert found.work == pytest.approx(1.111, abs=0.001)


def test_the_readme_says_what_padding_v41_costs(v41: Description) -> None:
    found = padding(v41, both(2560))
    text = " ".join((REPOSITORY / "README.md").read_text(encoding="utf-8").split())
    figures = f"{size(found.disk)} on disk, {size(found.per_rank(Serving(ep=8)))} per rank (EP 8) and {found.work - 1:.0%}"
    assert f"Padding would cost {figures.replace('%', ' %')} more expert arithmetic" in text


def test_shared_experts_of_v41_in_the_kernel_replicated(v41: Description) -> None:
    found = costs(v41, Serving(tp=4), {"megamoe-512": both(2560), "megamoe-128": both(2304)})
    assert found.shared_kernel / GIB == pytest.approx(1.36, abs=0.005)
    assert found.shared_sharded == found.shared_kernel / 4


@pytest.mark.parametrize(("ep", "scales"), [(4, 3.96), (8, 1.98), (16, 0.99)])
def test_what_sglang_holds_twice_of_v41(v41: Description, ep: int, scales: float) -> None:
    found = costs(v41, Serving(ep=ep), {}).duplicates
    assert found.sglang_scales / GIB == pytest.approx(scales, abs=0.005)
    assert found.sglang_shared / GIB == pytest.approx(0.88, abs=0.005)
    assert found.sglang_loading == 4 * found.sglang_scales


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "layers", "scales", "shared"),
    [(7168, 3072, 384, 61, 5.63, 2.50), (4096, 2048, 256, 43, 1.01, 0.67)],
    ids=["v4-pro", "v4-flash"],
)
def test_what_sglang_holds_twice_at_ep8(hidden: int, width: int, experts: int, layers: int, scales: float, shared: float) -> None:
    one = Model(hidden=hidden, width=width, experts=experts, shared="fp8-128", layers=1, mtp=0).subject().description
    found = costs(one, Serving(ep=8), {}).duplicates
    assert layers * found.sglang_scales / GIB == pytest.approx(scales, abs=0.005)
    assert layers * found.sglang_shared / GIB == pytest.approx(shared, abs=0.005)


def test_stored_bytes_are_those_of_the_headers(v41: Description) -> None:
    decoder = [d for d in v41.layers if d.layer.kind is LayerKind.DECODER]
    found = stored(decoder)
    assert found.routed == sum(
        t.nbytes for d in decoder for e in d.layer.routed for p in e.projections.values() for t in p.parts.values()
    )
    assert found.per_rank(Serving(ep=8)) == found.routed / 8 + found.shared


@pytest.mark.parametrize("store", ["mxfp4", "nvfp4", "fp8-128", "fp8-32", "fp8-channel", "bf16", "mxfp8"])
def test_padding_adds_what_the_wider_checkpoint_has_more(store: str) -> None:
    narrow, wide = (Model(hidden=512, width=w, experts=3, n_shared=2, routed=store, shared="fp8-32") for w in (256, 512))
    kept = stored(narrow.subject().description.layers)
    assert (
        stored(wide.subject().description.layers).total
        == kept.total + padding(narrow.subject().description, LaunchWidths(512, 1024)).disk
    )


def test_formats_without_kernel_scales_have_no_such_duplicates() -> None:
    found = costs(Model(routed="fp8-128", layers=1).subject().description, Serving(), {}).duplicates
    assert (found.sglang_scales, found.sglang_loading) == (0, 0)
    assert found.sglang_shared > 0


def test_stacked_experts_count_as_stored() -> None:
    tensors = {n: i for n, i in Model(layers=1, mtp=0).tensors().items() if ".experts." not in n}
    tensors["layers.0.ffn.experts.gate_up_proj"] = ("BF16", (2, 512, 512))
    from fse_convert.testing.memory import description_of

    assert stored(description_of(Model().full_config(), tensors).layers).routed == 2 * 512 * 512 * 2
