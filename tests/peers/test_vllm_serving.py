"""Converted checkpoints in vLLM's own loaders and model classes, unmodified and with the plugin, on a CPU.

vLLM 0.33.0 runs in an environment of its own, built by `make_env.py` when it is missing; `FSE_PEERS_VLLM` names it, by default
`vllm` in the peers' folder. Earlier releases run in the same environment, from the Python files of their wheels: 0.30 here,
0.29, 0.31 and 0.32 marked slow. What stands in for the GPU is listed in drivers/vllm_cpu.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.peers import vllm_cases
from tests.peers.vllm_cases import (
    CASES,
    EXPERTS,
    HIDDEN,
    LAYERS,
    PADDED,
    PARTS,
    V4,
    V4_1,
    WIDTH,
    WRAPPER,
    Answer,
    Case,
    Workshop,
    case,
)

pytestmark = pytest.mark.peers

SLOW = pytest.mark.slow
RELEASES = ["0.33", "0.30"]
EVERY_RELEASE = [*RELEASES, *(pytest.param(r, marks=SLOW) for r in ("0.29", "0.31", "0.32"))]
TAKEN = [
    pytest.param(release, c, id=f"{release} {c.id}", marks=SLOW if release in {"0.29", "0.31", "0.32"} else ())
    for release, cases in CASES.items()
    for c in cases
    if c.load_format == "fse" and c.stock() in cases and c.output.startswith("all") and not (c.damage or c.sabotage)
]


class Served:
    """The answers of one release."""

    def __init__(self, release: str, workshop: Workshop) -> None:
        self.release, self.workshop = release, workshop
        self.result = vllm_cases.answers(release, workshop)

    def __call__(self, of: Case) -> Answer:
        answer: Answer = self.result["answers"][of.id]
        return answer

    def loaded(self, of: Case) -> Answer:
        answer = self(of)
        assert answer["error"] is None, answer
        return answer

    def refusal(self, of: Case) -> str:
        """The plugin's message; nothing was read before it."""
        answer = self(of)
        assert answer["error"] == "NotServable", answer
        assert not answer["reads"], "weights were read before the refusal"
        return str(answer["text"])


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "vllm"
    folder.mkdir(exist_ok=True)
    return Workshop(folder)


@pytest.fixture
def release() -> str:
    raise NotImplementedError("every test says which")


@pytest.fixture
def served(workshop: Workshop, release: str) -> Served:
    return Served(release, workshop)


def by_layer(answer: Answer, of: Case) -> dict[str, Any]:
    """Layers by the checkpoint's names: a draft's modules are numbered on, or from zero."""
    names = ["mtp.0.ffn"] if of.model in {"v4-mtp", "v4.1-dspark"} else LAYERS[of.source]
    assert len(answer["layers"]) == len(names)
    return dict(zip(names, answer["layers"].values(), strict=True))


def check_taken(answer: Answer, stock: Answer, of: Case, folder: Path) -> None:
    """All that a working plugin is known by; it must hold of none that only says that it works."""
    kernel = vllm_cases.kernel_layout(folder)
    layers = by_layer(answer, of)
    assert {name: layer["kernel"] for name, layer in layers.items()} == {name: kernel[name] for name in layers}
    assert answer["reads"].get("sidecar") == len(PARTS) * len(layers)
    assert answer["reads"].get("shared") == downs(len(layers)), "more of the originals was read than what tells them apart"
    assert answer["reads"].get("rest") == stock["reads"]["rest"]
    for layer in layers.values():
        assert not layer["mlp"], "the originals are kept"
        width = layer["kernel"]["shared_l2_weight"]["shape"][1]
        assert layer["shared_bytes"] == kernel_bytes(width), "there is a second copy"
    assert answer["held"] <= stock["held"]
    assert answer["peak"] <= stock["peak"]
    assert any("in kernel layout from" in line for line in answer["log"])


def downs(layers: int) -> int:
    """Tensors of the originals that are read and compared, not loaded: weight and scale of each layer's down projections."""
    return 2 * layers


def kernel_bytes(width: int) -> int:
    """Bytes of a shared MLP of a width in kernel layout: weights, and a scale byte per 32 of them."""
    return 3 * width * HIDDEN * 33 // 32


@pytest.mark.parametrize("release", EVERY_RELEASE)
def test_it_is_the_release_that_it_should_be(served: Served) -> None:
    assert served.result["version"] == f"{served.release}.0"
    assert served.result["registered_again"] == [], "vLLM loads plugins in every process, some of them twice"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", [V4, V4_1, WRAPPER])
def test_unmodified_vllm_loads_the_output_and_fuses(served: Served, model: Any) -> None:
    of = model("all-512", "auto")
    answer = served.loaded(of)
    assert answer["not_loaded"] == []
    assert "sidecar" not in answer["reads"], "vLLM read fse/ by itself"
    kernel = vllm_cases.kernel_layout(served.workshop.checkpoint(of))
    layers = by_layer(answer, of)
    assert {layer["width"] for layer in layers.values()} == {PADDED}
    assert {name: layer["kernel"] for name, layer in layers.items()} == {name: kernel[name] for name in layers}


@pytest.mark.parametrize("release", ["0.33"])
def test_a_checkpoint_without_an_index_does_not_draw_the_sidecar_in(served: Served) -> None:
    """Then vLLM takes every file of the folder; fse/ is a folder of its own."""
    answer = served.loaded(case("v4-one-file", "v4", "all-512", "auto"))
    assert answer["not_loaded"] == []
    assert "sidecar" not in answer["reads"]


@pytest.mark.parametrize("release", ["0.33"])
@pytest.mark.parametrize("source", ["v4", "v4.1"])
def test_0_33_fuses_the_source_too_and_a_padded_one_costs_memory(served: Served, source: str) -> None:
    model = V4 if source == "v4" else V4_1
    before, after = served.loaded(model("", "auto")), served.loaded(model("all-512", "auto"))
    assert all(layer["kernel"] and layer["width"] == WIDTH for layer in before["layers"].values())
    layers, wider = len(LAYERS[source]), PADDED - WIDTH
    routed = EXPERTS * 3 * wider * HIDDEN * 17 // 32  # 4 bits and a scale byte per 32 of them
    assert after["held"] - before["held"] == layers * (routed + kernel_bytes(wider))


@pytest.mark.parametrize("release", ["0.30"])
def test_0_30_fuses_only_after_the_conversion(served: Served) -> None:
    before, after = served.loaded(V4("", "auto")), served.loaded(V4("all-512", "auto"))
    assert all(not layer["kernel"] and layer["width"] == PADDED for layer in before["layers"].values())
    assert any("Disabling native MegaMoE shared-expert fusion" in line for line in before["log"])
    assert all(layer["kernel"] for layer in after["layers"].values())
    assert not any("Disabling" in line for line in after["log"])


@pytest.mark.parametrize("release", RELEASES)
def test_shared_only_is_the_source_to_an_unmodified_server(served: Served) -> None:
    source, shared = served.loaded(V4("", "auto")), served.loaded(V4("shared-512", "auto"))
    assert shared["layers"] == source["layers"]
    assert shared["reads"] == source["reads"]


@pytest.mark.parametrize(
    ("release", "model"),
    [("0.33", V4_1), *(pytest.param(r, model, marks=SLOW) for r in ("0.31", "0.32") for model in (V4, WRAPPER))],
)
def test_from_0_31_on_the_source_fuses_as_it_is_and_so_does_an_output_that_is_not_padded(served: Served, model: Any) -> None:
    """The kernel is called with the same tensors either way, and they are those of ``fse/``; the plugin's too."""
    of = model("all-128")
    kernel = vllm_cases.kernel_layout(served.workshop.checkpoint(of))
    for case_ in (model("", "auto"), model("all-128", "auto"), of):
        answer = served.loaded(case_)
        layers = by_layer(answer, of)
        assert {layer["width"] for layer in layers.values()} == {WIDTH}
        assert {name: layer["kernel"] for name, layer in layers.items()} == {name: kernel[name] for name in layers}, case_.id
        assert not any("Disabling" in line for line in answer["log"])


@pytest.mark.parametrize(("release", "of"), TAKEN)
def test_the_sidecar_is_taken_and_nothing_is_held_twice(served: Served, of: Case) -> None:
    answer, stock = served.loaded(of), served.loaded(of.stock())
    assert answer["not_loaded"] == stock["not_loaded"]
    check_taken(answer, stock, of, served.workshop.checkpoint(of))
    for name, layer in by_layer(stock, of).items():
        assert layer["kernel"] == by_layer(answer, of)[name]["kernel"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_plugin_that_only_logs_its_failure_is_found_out(served: Served) -> None:
    of = V4("all-512", sabotage=True)
    answer = served.loaded(of)
    assert any("could not take the shared experts over" in line for line in answer["log"])
    with pytest.raises(AssertionError):
        check_taken(answer, served.loaded(V4("all-512", "auto")), of, served.workshop.checkpoint(of))


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_kernel_gets_is_what_the_sidecar_holds(served: Served) -> None:
    of = V4("all-512", damage="byte")
    changed, whole = served.loaded(of), served.loaded(V4("all-512"))
    kernel = vllm_cases.kernel_layout(served.workshop.checkpoint(of))
    layers = by_layer(changed, of)
    assert {name: layer["kernel"] for name, layer in layers.items()} == {name: kernel[name] for name in layers}
    differ = [(n, p) for n, layer in layers.items() for p in PARTS if layer["kernel"][p] != by_layer(whole, of)[n]["kernel"][p]]
    assert differ == [("layers.1.ffn", "shared_l1_weight")]


@pytest.mark.parametrize("release", ["0.30"])
@pytest.mark.parametrize("model", [V4, WRAPPER])
def test_0_30_runs_shared_only_fused_with_the_plugin(served: Served, model: Any) -> None:
    """0.30 pads the routed experts itself: the one release for which --experts shared is enough."""
    of = model("shared-512")
    answer, everything = served.loaded(of), served.loaded(model("all-512"))
    assert answer["layers"] == everything["layers"]
    assert answer["held"] == everything["held"]
    assert answer["reads"]["shared"] == downs(len(LAYERS[of.source]))
    assert answer["peak"] < served.loaded(model("shared-512", "auto"))["peak"]


@pytest.mark.parametrize("release", ["0.30"])
def test_0_30_peaks_lower_by_what_the_shared_experts_take(served: Served) -> None:
    """They are not there yet when the routed experts are transformed, which is when it peaks."""
    plugin, stock = served.loaded(V4("all-512")), served.loaded(V4("all-512", "auto"))
    assert stock["peak"] - plugin["peak"] > 0.9 * len(LAYERS["v4"]) * kernel_bytes(PADDED)


@pytest.mark.parametrize("release", ["0.33"])
def test_0_33_holds_and_peaks_the_same_with_and_without(served: Served) -> None:
    plugin, stock = served.loaded(V4("all-512")), served.loaded(V4("all-512", "auto"))
    assert (plugin["held"], plugin["peak"]) == (stock["held"], stock["peak"])


@pytest.mark.parametrize("release", ["0.33"])
def test_files_read_as_a_whole_load_too(served: Served) -> None:
    threaded = served.loaded(V4("all-512", arguments={"model_loader_extra_config": {"enable_multithread_load": True}}))
    assert threaded["layers"] == served.loaded(V4("all-512"))["layers"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_reload_takes_the_standard_layout_or_is_refused(served: Served) -> None:
    answer = served.loaded(V4("all-512"))
    if served.release == "0.30":  # nothing is left there that could take the originals
        assert "[reload-unsupported]" in answer["reload"]
    else:
        stock = served.loaded(V4("all-512", "auto"))
        assert answer["reload"] == f"{sum(stock['reads'].values())} tensors: rest shared"


@pytest.mark.parametrize("release", ["0.33", *(pytest.param(r, marks=SLOW) for r in ("0.31", "0.32"))])
def test_padded_shared_experts_beside_narrower_routed_ones(served: Served) -> None:
    text = served.refusal(V4("shared-512"))
    assert "[width-mismatch]" in text
    assert f"{PADDED} wide, this server's routed experts {WIDTH}" in text
    assert f"--target vllm-{served.release}" in text
    assert "without --experts shared" in text


@pytest.mark.parametrize("release", ["0.30"])
@pytest.mark.parametrize("output", ["all-128", "shared-128"])
def test_a_width_that_the_server_pads_away(served: Served, output: str) -> None:
    text = served.refusal(V4(output))
    assert "[width-mismatch]" in text
    assert f"{WIDTH} wide, this server's routed experts {PADDED}" in text
    assert "--target vllm-0.30" in text


@pytest.mark.parametrize("release", ["0.33"])
@pytest.mark.parametrize("output", ["all-128", "shared-128"])
def test_an_unpadded_output_is_taken_where_the_kernel_takes_its_width(served: Served, output: str) -> None:
    answer = served.loaded(V4(output))
    assert {layer["width"] for layer in answer["layers"].values()} == {WIDTH}
    assert answer["reads"]["shared"] == downs(len(LAYERS["v4"]))


@pytest.mark.parametrize("release", RELEASES)
def test_other_refusals(served: Served) -> None:
    missing = served.refusal(V4(""))
    assert "[sidecar-missing]" in missing
    assert "draft_load_config" in missing, "it may be a draft in a folder of its own that was not converted"
    assert "[layout-unknown]" in served.refusal(V4("all-512", damage="version"))
    fusion_off = served.refusal(V4("all-512", environment=vllm_cases.FUSION_OFF))
    assert "[not-fused]" in fusion_off
    assert "--load-format auto" in fusion_off
    lost = served(V4("all-512", damage="layer"))
    assert lost["error"] == "NotServable"
    assert "[sidecar-layer]" in lost["text"]


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_conversion_did_not_write_is_refused(served: Served) -> None:
    assert "[sidecar-stale]" in served.refusal(V4("all-512", damage="config"))
    assert "[manifest-damaged]" in served.refusal(V4("all-512", damage="manifest"))
    for damage, code in (("silent", "sidecar-damaged"), ("shard", "sidecar-stale")):
        answer = served(V4("all-512", damage=damage))  # found out when the tensor is read
        assert answer["error"] == "NotServable"
        assert f"[{code}]" in answer["text"]
        assert "layers.1.ffn" in answer["text"]


@pytest.mark.parametrize("release", ["0.33"])
def test_an_output_without_proof_loads_and_the_log_says_that_nothing_was_compared(served: Served) -> None:
    answer, whole = served.loaded(V4("all-512", damage="unproved")), served.loaded(V4("all-512"))
    assert sum("--verify none" in line for line in answer["log"]) == 1
    assert not any("--verify none" in line for line in whole["log"])
    assert answer["layers"] == whole["layers"]
    assert "shared" not in answer["reads"]


@pytest.mark.parametrize("release", ["0.33"])
def test_another_number_of_shared_experts(served: Served) -> None:
    text = served.refusal(V4("all-512", damage="count"))
    assert "[shared-count-mismatch]" in text
    assert "2 shared experts per layer, the model has 1" in text


@pytest.mark.parametrize("release", ["0.33"])
def test_two_shared_experts_are_one_mlp(served: Served) -> None:
    layers = served.loaded(case("v4-two", "v4", "all-512"))["layers"].values()
    assert [layer["kernel"]["shared_l2_weight"]["shape"] for layer in layers] == [[HIDDEN, 2 * PADDED]]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("model", [V4, V4_1])
def test_the_sidecar_alone_is_no_model_to_an_unmodified_server(served: Served, model: Any) -> None:
    """Not even with a config.json beside: the first tensor already has no place, and nothing is half loaded."""
    answer = served(model("all-512", "auto", damage="alone"))
    assert answer["error"]
    assert sum(answer["reads"].values()) <= 1
