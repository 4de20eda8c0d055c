"""What the configs say about quantisation, and which class vLLM makes of it."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fse_convert.model.quantization import Quantization, read_quantization
from fse_convert.servers.aiter.vllm_config import RELEASES, VllmQuantKind, build_vllm_quant
from fse_convert.servers.release_names import is_since
from fse_convert.servers.verdict import Outcome
from tests.releases import until_newest

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP4 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": FP4,
    "exclude": ["lm_head"],
    "layer_quant_config": {"*shared*": {"weight": {"dtype": "fp8_e4m3"}}},
    "layer_type_quant_config": {},
    "export": {"kv_cache_group": []},
}
FILE = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]},
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from(["fp8", "quark", "modelopt", "fp4", "*", "re:(", "experts", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FP8, *QUARK, "quant_algo", "ignore"]), inner, max_size=4)
    ),
    max_leaves=8,
)


NEWEST = RELEASES["0.33"]


def instead(quantization: Quantization) -> tuple[Outcome, str]:
    """The verdict of a server that builds no quantisation object: outcome and message."""
    found = build_vllm_quant(quantization, "deepseek_v3", NEWEST).instead
    assert found is not None
    return found.outcome, found.reasons[0].message


def codes(quantization: Quantization) -> list[str]:
    return [problem.code for problem in quantization.conflicts]


def of(scheme: Any, **config: Any) -> Quantization:
    return read_quantization({"quantization_config": scheme, **config})


def test_an_unquantised_model_has_no_source() -> None:
    nothing = read_quantization({"model_type": "deepseek_v3"})
    assert (nothing.quantized, nothing.method, nothing.conflicts) == (False, None, ())


def test_deepseek_v4_and_v41_keep_the_expert_dtype_in_different_places() -> None:
    v4 = of(FP8, expert_dtype="fp4")
    v41 = of({**FP8, "weight_block_size": [32, 32], "expert_dtype": "fp4"}, text_config={"hidden_size": 5120})
    assert (v4.method, v4.block, v4.expert_dtype) == ("fp8", (128, 128), "fp4")
    assert (v41.block, v41.expert_dtype) == ((32, 32), "fp4")
    assert v4.conflicts == v41.conflicts == ()


def test_expert_dtypes_that_disagree_are_a_conflict() -> None:
    both = of({**FP8, "expert_dtype": "fp8"}, expert_dtype="fp4", text_config={"expert_dtype": "fp8"})
    assert both.expert_dtype == "fp4"
    assert [(p.code, p.where) for p in both.conflicts] == [
        ("expert-dtype-conflict", "config.json:text_config"),
        ("expert-dtype-conflict", "quantization_config"),
    ]


@pytest.mark.parametrize(
    ("scheme", "key", "ignored"),
    [
        ({**FP8, "ignored_layers": ["a"]}, "ignored_layers", ("a",)),
        ({**FP8, "modules_to_not_convert": ["a"]}, "modules_to_not_convert", ("a",)),
        ({**FP8, "ignored_layers": [], "modules_to_not_convert": ["a"]}, "modules_to_not_convert", ("a",)),
        ({**FP8, "ignored_layers": ["a"], "modules_to_not_convert": ["a"]}, "ignored_layers", ("a",)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["a", "b"]}, "ignore", ("a", "b")),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["a"]}, "exclude_modules", ("a",)),
        ({"quant_method": "mxfp8", "ignored_layers": ["a"]}, "ignored_layers", ("a",)),
        ({"quant_method": "compressed-tensors", "ignore": ["re:.*a"]}, "ignore", ("re:.*a",)),
        (QUARK, "exclude", ("lm_head",)),
        (FP8, None, ()),
    ],
)
def test_the_ignore_list_is_the_one_that_servers_read(scheme: dict[str, Any], key: str | None, ignored: tuple[str, ...]) -> None:
    found = of(scheme)
    assert (found.ignore_key, found.ignore, found.conflicts) == (key, ignored, ())


def test_a_list_under_another_key_is_said_to_be_unread() -> None:
    found = of({**FP8, "ignored_layers": ["a"], "ignore": ["b", "c"]})
    assert found.ignore == ("a",)
    assert [(p.code, p.where) for p in found.conflicts] == [("ignore-key-unread", "ignore")]
    assert "2 modules" in found.conflicts[0].message


@pytest.mark.parametrize("value", ["lm_head", {"a": 1}, [1], ["a", None], 7])
def test_an_ignore_list_of_the_wrong_type_is_a_conflict(value: Any) -> None:
    assert "ignore-not-a-list" in codes(of({**FP8, "modules_to_not_convert": value}))


@pytest.mark.parametrize("value", [[128], [128, 128, 1], [0, 128], "128x128", [128.0, 128], [True, 1]])
def test_a_block_that_is_no_pair_of_positive_integers_is_a_conflict(value: Any) -> None:
    found = of({**FP8, "weight_block_size": value})
    assert found.block is None
    assert codes(found) == ["block-size-invalid"]


@pytest.mark.parametrize(
    ("method", "block"), [("fp8", (32, 32)), ("FP8", (32, 32)), ("deepseek_v4_fp8", (32, 32)), ("quark", None)]
)
def test_only_fp8_methods_have_the_block_that_servers_read(method: str, block: tuple[int, int] | None) -> None:
    assert of({**FP8, "quant_method": method, "weight_block_size": [32, 32]}).block == block


def test_a_missing_method_is_a_conflict() -> None:
    found = of({key: value for key, value in FP8.items() if key != "quant_method"})
    assert (found.method, codes(found)) == (None, ["quant-method-missing"])


def test_a_quark_export_that_lacks_a_part_is_a_conflict() -> None:
    assert codes(of(QUARK)) == []
    assert codes(of({"quant_method": "quark"})) == ["quark-incomplete"] * 3


def test_modelopts_own_file_counts_only_where_config_json_is_silent() -> None:
    alone = read_quantization({}, FILE)
    assert (alone.source, alone.method, alone.quant_algo, alone.ignore) == (
        "hf_quant_config.json",
        "modelopt_fp4",
        "NVFP4",
        ("lm_head",),
    )
    assert alone.conflicts == ()
    both = read_quantization({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["a"]}}, FILE)
    assert (both.source, both.quant_algo) == ("config.json", "FP8")
    assert codes(both) == ["quantization-conflict"] * 2
    same = read_quantization(
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "nvfp4", "ignore": ["lm_head"]}}, FILE
    )
    assert same.conflicts == ()


def test_mxfp8_in_modelopts_own_file_is_not_read_by_vllm() -> None:
    found = read_quantization({}, {**FILE, "quantization": {**FILE["quantization"], "quant_algo": "MXFP8"}})
    assert codes(found) == ["modelopt-file-unread"]
    assert instead(found) == (Outcome.ERROR, "Unknown ModelOpt quant algo: MXFP8")


def test_nested_and_compression_configs_are_found() -> None:
    assert read_quantization({"text_config": {"quantization_config": FP8}}).source == "config.json:text_config"
    assert read_quantization({"compression_config": FP8}).source == "config.json:compression_config"


def test_nvfp4_repackages_keep_both_algorithms() -> None:
    found = of({**FP8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "nvfp4", "expert_dtype": "fp4"})
    assert (found.method, found.quant_algo, found.moe_quant_algo) == ("fp8", "MIXED_PRECISION", "NVFP4")


@given(JSON, st.none() | JSON)
def test_reading_and_building_never_raise(scheme: Any, file: Any) -> None:
    found = read_quantization({"quantization_config": scheme, "text_config": scheme}, file)
    for release in RELEASES.values():
        build_vllm_quant(found, "deepseek_v4", release)


def grouped(**weights: Any) -> dict[str, Any]:
    """A compressed-tensors description of one group."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


ALGO = {"producer": {"name": "modelopt"}}
SPELLINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "FP8": (
        {"quant_method": "fp8"}, {"quant_method": "FP8"}, {"quant_method": "deepseek_v4_fp8"},
        {**ALGO, "quantization": {"quant_algo": "FP8_PB_WO"}},
    ),
    "NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"},
        {**ALGO, "quantization": {"quant_algo": "NVFP4"}}, {"quantization": {"quant_algo": "NVFP4"}, **ALGO},
    ),
    "INT4": (
        grouped(num_bits=4, type="int", group_size=32), {**grouped(num_bits=4, type="int"), "quant_method": "compressed_tensors"},
    ),
    "MXFP4": tuple({**QUARK, "quant_method": m, "exclude": [], "layer_quant_config": {}} for m in ("quark", "Quark")),
    "MXFP8": ({"quant_method": "mxfp8"}, {**ALGO, "quantization": {"quant_algo": "MXFP8"}}),
    "INT8": ({"quant_method": "gptq", "bits": 8},),
}  # fmt: skip
"""What weights are stored as, and how configs say it."""
PLACES = ("config.json", "hf_quant_config.json", "config.json:compression_config", "config.json:text_config")


def read(described: dict[str, Any], **config: Any) -> Quantization:
    """Read descriptions, each in its place."""
    text = {"quantization_config": described["config.json:text_config"]} if "config.json:text_config" in described else {}
    keys = {"quantization_config": "config.json", "compression_config": "config.json:compression_config"}
    config |= {key: described[place] for key, place in keys.items() if place in described}
    return read_quantization({**config, "text_config": text | config.get("text_config", {})}, described.get("hf_quant_config.json"))


@pytest.mark.parametrize(("first", "second"), list(permutations(PLACES, 2)))
def test_two_places_conflict_where_they_describe_different_weights_and_only_there(first: str, second: str) -> None:
    read_from, other = sorted((first, second), key=PLACES.index)
    for mine, theirs in product(SPELLINGS, repeat=2):
        for one, two in product(SPELLINGS[mine], SPELLINGS[theirs]):
            found = [p for p in read({first: one, second: two}).conflicts if p.code == "quantization-conflict"]
            assert [(p.where, read_from in p.message) for p in found] == ([(other, True)] if mine != theirs else []), (one, two)


def test_int4_beside_nvfp4_is_said_in_full() -> None:
    found = read({"config.json:text_config": SPELLINGS["INT4"][0], "hf_quant_config.json": SPELLINGS["NVFP4"][2]})
    (conflict,) = found.conflicts
    assert (found.source, conflict.where) == ("hf_quant_config.json", "config.json:text_config")
    assert conflict.message == "weights are INT4 here and NVFP4 in hf_quant_config.json"


def test_a_mixed_checkpoint_may_be_described_in_part() -> None:
    mixed = {**FP8, "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    assert (
        read({"config.json": mixed, "hf_quant_config.json": {**ALGO, "quantization": {"moe_quant_algo": "NVFP4"}}}).conflicts == ()
    )


@pytest.mark.parametrize("method", ["fp8", "FP8", "deepseek_v4_fp8"])
@pytest.mark.parametrize("where", ["", "text_config", *PLACES])
@pytest.mark.parametrize("key", ["weight_block_size", "expert_dtype"])
def test_blocks_and_expert_dtypes_are_read_wherever_they_stand(key: str, where: str, method: str) -> None:
    value: Any = [32, 32] if key == "weight_block_size" else "fp4"
    if where in PLACES:
        found = read({where: {"quant_method": method, key: value}})
    else:
        found = read({"config.json": {"quant_method": method}}, **({"text_config": {key: value}} if where else {key: value}))
    expected = ((32, 32), None) if key == "weight_block_size" else (None, "fp4")
    assert (found.block, found.expert_dtype) == expected
    assert found.conflicts == ()


@pytest.mark.parametrize(("first", "second"), list(permutations(["", "text_config", *PLACES], 2)))
def test_two_places_that_state_different_blocks_conflict(first: str, second: str) -> None:
    for other, expected in (([128, 128], []), ([32, 32], ["quantization-conflict"])):
        described, top = {"config.json": {"quant_method": "fp8"}}, {}
        for where, value in ((first, [128, 128]), (second, other)):
            if where in PLACES:
                described[where] = {"quant_method": "fp8", "weight_block_size": value}
            else:
                top |= {"text_config": {"weight_block_size": value}} if where else {"weight_block_size": value}
        assert codes(read(described, **top)) == expected


@pytest.mark.parametrize("block", [[128, 128], "128x128"])
def test_the_block_of_compressed_tensors_stands_in_its_group(block: Any) -> None:
    one = grouped(num_bits=8, type="float", strategy="block", block_structure=block)
    assert (of(one).block, of(one).block_hint, of(one).block_key) == ((128, 128), (128, 128), "block_structure")
    two = {**one, "config_groups": {**one["config_groups"], "group_1": {"weights": {"num_bits": 8, "type": "float"}}}}
    assert (of(two).block, of(two).block_hint) == (None, (128, 128)), "of one group of two: a hint, no more"


def test_quarks_block_is_a_hint() -> None:
    layers = {"re:mtp.*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}}
    found = of({**QUARK, "layer_quant_config": layers})
    assert (found.block, found.block_hint, codes(found)) == (None, (128, 128), [])


@given(st.permutations([*FP8, "expert_dtype", "config_groups", "ignored_layers"]), st.permutations(["a", "b", "c"]))
def test_the_order_of_keys_changes_nothing(keys: list[str], groups: list[str]) -> None:
    weights = {name: {"num_bits": 8, "type": "float", "block_structure": [32 * (i + 1)] * 2} for i, name in enumerate("abc")}
    scheme = {
        **FP8,
        "weight_block_size": [256, 256],
        "expert_dtype": "fp4",
        "ignored_layers": ["x"],
        "config_groups": {name: {"weights": weights[name]} for name in groups},
    }
    found = of({key: scheme[key] for key in keys})
    assert (found.block, found.expert_dtype, found.ignore, found.conflicts) == ((32, 32), "fp4", ("x",), ())


@pytest.mark.parametrize(
    ("scheme", "model_type", "kind", "name"),
    [
        (FP8, "deepseek_v3", VllmQuantKind.FP8, "Fp8Config"),
        (FP8, "deepseek_v4", VllmQuantKind.DEEPSEEK_V4, "DeepseekV4FP8Config"),
        (FP8, "deepseek_v41", VllmQuantKind.DEEPSEEK_V4, "DeepseekV4FP8Config"),
        ({**FP8, "quant_method": "deepseek_v4_fp8"}, "other", VllmQuantKind.DEEPSEEK_V4, "DeepseekV4FP8Config"),
        (QUARK, "deepseek_v4", VllmQuantKind.QUARK, "QuarkConfig"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "glm4_moe", VllmQuantKind.MXFP8, "ModelOptMxFp8Config"),
        ({"quant_method": "mxfp8"}, "minimax_m3", VllmQuantKind.MXFP8, "ModelOptMxFp8Config"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "glm4_moe", VllmQuantKind.OTHER, "ModelOptNvFp4Config"),
        ({"quant_method": "compressed_tensors"}, "glm4_moe", VllmQuantKind.OTHER, "CompressedTensorsConfig"),
        ({"weight_block_size": [128, 128]}, "deepseek_v3", VllmQuantKind.NONE, ""),
        (None, "deepseek_v3", VllmQuantKind.NONE, ""),
    ],
)
def test_the_class_that_vllm_picks(scheme: Any, model_type: str, kind: VllmQuantKind, name: str) -> None:
    built = build_vllm_quant(of(scheme), model_type, NEWEST)
    assert (built.kind, built.class_name, built.instead) == (kind, name, None)


def test_releases_pick_differently() -> None:
    mxfp8 = of({"quant_method": "mxfp8"})
    kinds = [build_vllm_quant(of(QUARK), "deepseek_v4", row).kind for row in RELEASES.values()]
    assert kinds == [*until_newest((VllmQuantKind.DEEPSEEK_V4, VllmQuantKind.FP8, VllmQuantKind.QUARK), RELEASES)]
    assert {
        name for name, row in RELEASES.items() if build_vllm_quant(of(FP8), "deepseek_v4", row).kind is VllmQuantKind.DEEPSEEK_V4
    } == set(RELEASES) - {"0.30", "0.31", "0.32"}
    assert {name for name, row in RELEASES.items() if build_vllm_quant(mxfp8, "minimax_m3", row).kind is VllmQuantKind.MXFP8} == {
        name for name in RELEASES if is_since(name, "0.33")
    }
    assert list(RELEASES) == sorted(RELEASES)
    assert is_since("0.33", "0.30")
    assert not is_since("0.9", "0.30")


@pytest.mark.parametrize(
    ("scheme", "error"),
    [
        ({**FP8, "weight_block_size": [128]}, "must have 2 dimensions, but got 1 dimensions"),
        ({**FP8, "activation_scheme": "static"}, "only supports dynamic activation scheme"),
        ({"quant_method": "fp8"}, "Cannot find any of ['activation_scheme']"),
        ({"quant_method": "quark"}, "The export key should be included"),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": None},
            "exclude_modules must be a list, got <class 'NoneType'>",
        ),
        ({"quant_method": "humming"}, "humming quantization is currently not supported in rocm."),
        ({"quant_method": "my_quant"}, "Unknown quantization method: my_quant."),
    ],
)
def test_what_vllm_refuses_to_build(scheme: dict[str, Any], error: str) -> None:
    outcome, message = instead(of(scheme))
    assert outcome is Outcome.ERROR
    assert error in message


@pytest.mark.parametrize(
    "scheme",
    [{**FP8, "ignored_layers": "lm_head"}, {**FP8, "weight_block_size": 128}, {"quant_method": 7}, "fp8", [FP8]],
)
def test_what_is_outside_the_rules_is_said_to_be(scheme: Any) -> None:
    assert instead(of(scheme))[0] is Outcome.UNKNOWN


@pytest.mark.parametrize("value", [5, {}, ["fp4"], True])
def test_an_expert_dtype_of_another_type_is_none_that_is_stored(value: object) -> None:
    """`--heal` and a server as target write it anew, so it is a conflict like any other word."""
    assert of({**FP8, "expert_dtype": value}).expert_dtype == str(value)
