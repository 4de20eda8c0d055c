"""One case per way in which a server that says yes then fails, and beside each what looks like it and is sound.

Which releases fail, and how, is of the published loaders: they were run on small checkpoints of these shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fse_convert.servers.hazards import HAZARDS, LAST
from fse_convert.servers.judge import Answer, judge
from fse_convert.servers.subject import Subject
from fse_convert.servers.verdict import Outcome
from fse_convert.testing.checkpoints import make_spec
from fse_convert.testing.memory import PROJ, Model, Tensors, expert, subject_of
from tests.releases import AITER, FHMOE, MEGA, SLOTS

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP4_SPEC = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
MX = {"weight": FP4_SPEC, "input_tensors": {**FP4_SPEC, "is_dynamic": True}}
FP8_SPEC = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128]}}
QUARK = {
    "quant_method": "quark", "global_quant_config": MX, "exclude": [], "layer_quant_config": {}, "layer_type_quant_config": {},
    "export": {"kv_cache_group": []},
}  # fmt: skip
V41 = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"]}
EVERY = [*AITER, *FHMOE]
UNREAD = [*EVERY, *MEGA]
ALL_SLOTS = dict.fromkeys([*SLOTS, "atom"], "xxx")


def fp8(routed: str, shared: str = "", **config: Any) -> Model:
    """DeepSeek-V4 with FP8 experts, which says so."""
    return Model(routed=routed, shared=shared or routed, config={"expert_dtype": "fp8", "quantization_config": FP8, **config})


def quark(shared: str = "mxfp4-u8", mtp: str = "", routed: str = "mxfp4-u8", **more: Any) -> Model:
    """DeepSeek-V4 by Quark. ``more``: keys of its quantisation."""
    return Model(routed=routed, shared=shared, mtp_shared=mtp, config={"quantization_config": {**QUARK, **more}})


def answers(about: Subject) -> dict[str, Answer]:
    return {a.name: a for a in judge(about)}


def unsafe(about: Subject, code: str) -> dict[str, str]:
    """The targets with a layer that is unsafe for this reason, with a letter per layer: x for such a one."""
    found = {}
    for name, answer in answers(about).items():
        hit = [v.outcome is Outcome.UNSAFE and any(r.code == code for r in v.reasons) for v in answer.layers]
        if any(hit):
            found[name] = "".join("x" if h else v.outcome.value[0] for h, v in zip(hit, answer.layers, strict=True))
            assert answer.model.outcome is Outcome.UNSAFE
            assert not answer.fused
            assert any(r.code == code and r.hint for r in answer.model.reasons)
    return found


VLLM_128 = [*(f"vllm-0.{n}" for n in range(31, 34)), *MEGA]
SGLANG_128 = ["sglang-0.5.22", "sglang-0.5.23"]
"""Native targets that fuse width 256, and AITER MegaMoE."""
NATIVE_FP4 = Model(shared="mxfp4", config={"quantization_config": FP8})
QUARKS_NAMES = replace(NATIVE_FP4, routed="mxfp4-u8", shared="mxfp4-u8")
REGULAR = {r"re:mtp\.0\.ffn\.shared_experts\..*": FP8_SPEC}
SHARED_NAMES = [f"{layer}.ffn.shared_experts.w{n}" for layer in ("layers.0", "layers.1", "mtp.0") for n in (1, 2, 3)]
SHORT_VLLM = {
    **dict.fromkeys(["vllm-0.31", "vllm-0.32", "vllm-0.33", "vllm-0.33-aiter-mega"], "ffx"),
    **dict.fromkeys(["vllm-0.30-aiter", "vllm-0.31-aiter", "vllm-0.32-aiter"], "uux"),
}
SHORT_SGLANG = dict.fromkeys(["sglang-0.5.23", *SLOTS[1:]], "ffx")
SHORT_V41 = {name: letters for name, letters in SHORT_VLLM.items() if name != "vllm-0.33-aiter-mega"}


def watched(promised: int, layers: int) -> dict[str, Any]:
    """Keys of a DSpark drafter that watches some layers."""
    return {"num_nextn_predict_layers": promised, "dspark_target_layer_ids": list(range(layers))}


def twice(letters: dict[str, str]) -> dict[str, str]:
    """The same verdicts where two layers of the drafter are there."""
    return {name: found + found[-1] for name, found in letters.items()}


CASES: list[tuple[str, Model, str, dict[str, str]]] = [
    (
        "FP8 experts, no quantisation stated",
        fp8("fp8-128-f32-scale", quantization_config=None),
        "quantization-unstated",
        ALL_SLOTS | dict.fromkeys(AITER, "xxx"),
    ),
    (
        "FP8 experts, a quantisation without a method",
        fp8("fp8-128-f32-scale", quantization_config={k: v for k, v in FP8.items() if k != "quant_method"}),
        "quantization-unstated",
        ALL_SLOTS | dict.fromkeys(AITER, "xxx"),
    ),
    ("BF16 experts, none stated", Model(routed="bf16", shared="bf16"), "quantization-unstated", {}),
    (
        "BF16 experts of an FP8 config",
        Model(routed="bf16", shared="bf16", config={"quantization_config": FP8}),
        "scales-expected",
        ALL_SLOTS | dict.fromkeys([*AITER[1:4], *MEGA], "xxx"),
    ),
    (
        "BF16 experts of an AWQ config",
        Model(routed="bf16", shared="bf16", config={"quantization_config": {"quant_method": "awq", "bits": 4}}),
        "scales-expected",
        ALL_SLOTS,
    ),
    ("FP8 experts of an FP8 config", fp8("fp8-128-f32-scale"), "scales-expected", {}),
    ("FP8 experts with E8M0 scales", fp8("fp8-128"), "fp8-e8m0-scales", dict.fromkeys(EVERY, "xxx")),
    ("FP8 experts with E8M0 scales as bytes", fp8("fp8-32-u8"), "fp8-e8m0-scales", dict.fromkeys(EVERY, "xxx")),
    ("FP8 experts with F32 scales", fp8("fp8-128-f32-scale"), "fp8-e8m0-scales", {}),
    ("MXFP4 experts, FP8 shared ones with E8M0 scales", Model(shared="fp8-128"), "fp8-e8m0-scales", {}),
    (
        "V4.1, FP8 experts with E8M0 scales",
        Model(routed="fp8-32", config={**V41, "expert_dtype": "fp8", "quantization_config": FP8}),
        "fp8-e8m0-scales",
        dict.fromkeys(AITER[1:], "xxx"),
    ),
    (
        "E8M0 shared beside F32 routed",
        fp8("fp8-128-f32-scale", "fp8-128"),
        "fp8-slot-e8m0",
        dict.fromkeys(AITER[1:], "xxx"),
    ),
    ("F32 scales in both", fp8("fp8-128-f32-scale"), "fp8-slot-e8m0", {}),
    ("the official V4", Model(shared="fp8-128"), "aiter-fp4-overlooked", dict.fromkeys(AITER[1:4], "xxx")),
    ("V4 with FP8 experts", fp8("fp8-128-f32-scale"), "aiter-fp4-overlooked", {}),
    (
        "shared scales typed U8",
        Model(shared="fp8-32-u8", config={"quantization_config": {**FP8, "weight_block_size": [32, 32]}}),
        "shared-scale-bytes",
        dict.fromkeys([f"vllm-0.{n}" for n in range(31, 34)], "xxx"),
    ),
    *(
        (
            f"{entry} among {key}",
            Model(shared="fp8-128", config={"quantization_config": {**FP8, "ignored_layers": [], key: [entry]}}),
            "quantization-excluded",
            {n: found for names, found in ((VLLM_128, vllm), (SGLANG_128, sglang), (SLOTS, slots)) if found for n in names},
        )
        for key, entry, vllm, sglang, slots in (
            ("ignored_layers", "layers.0.ffn.experts", "xff", "", ""),
            ("ignored_layers", "layers.1.ffn.shared_experts.w2", "fxf", "", ""),
            ("ignored_layers", "layers.1.ffn.shared_experts.w1", "fxf", "", ""),  # one of two shards: vLLM raises
            ("ignored_layers", "layers.0.ffn.shared_experts", "", "", ""),
            ("ignored_layers", "model.layers.0.mlp.experts", "", "xff", "xff"),
            ("ignored_layers", "model.decoder.mlp.experts", "", "ffx", "ffx"),
            ("ignored_layers", "down_proj", "", "xxx", ""),
            *(("ignored_layers", f"model.layers.0.mlp.shared_experts.{p}.weight", "", "", "") for p in ("gate_proj", "up_proj")),
            ("ignored_layers", "model.layers.0.mlp.shared_experts.down_proj.weight", "", "xff", ""),
            ("modules_to_not_convert", "layers.0.ffn.experts", "xff", "", ""),
            ("modules_to_not_convert", "down_proj", "", "", ""),  # SGLang reads the empty list
        )
    ),
    (
        "FP8 without an activation scheme",
        Model(config={"quantization_config": {key: value for key, value in FP8.items() if key != "activation_scheme"}}),
        "activation-scheme-missing",
        dict.fromkeys([*(f"vllm-0.{n}" for n in range(31, 34)), "sglang-0.5.23", *SLOTS], "xxx"),
    ),
    ("a drafter of five layers, of which one is there", Model(config={"num_nextn_predict_layers": 5}), "drafter-short", SHORT_VLLM),
    (
        "DSpark of V4: three stages, whatever config.json promises",
        Model(mtp=2, config=watched(1, 1)),
        "drafter-short",
        twice(SHORT_VLLM),
    ),
    ("DSpark of V4, all there", Model(mtp=3, config=watched(1, 3)), "drafter-short", {}),
    ("DSpark of V4, as many as n_mtp_layers", Model(config=watched(3, 1) | {"n_mtp_layers": 1}), "drafter-short", {}),
    ("DSpark of V4.1, three promised", Model(mtp=2, config=V41 | watched(3, 2)), "drafter-short", twice(SHORT_V41)),
    ("DSpark of V4.1, all there", Model(config=V41 | watched(1, 1)), "drafter-short", {}),
    ("SGLang: a stage per watched layer", Model(config=V41 | watched(1, 2)), "drafter-short", SHORT_SGLANG),
    ("a drafter of which more is there than is promised", Model(mtp=3), "drafter-short", {}),
    ("V4 by Quark", quark(), "aiter-fp4-overlooked", {}),
    ("V4 by Quark, scales under their native name", quark("mxfp4", routed="mxfp4"), "aiter-fp4-overlooked", {}),
    ("MXFP4 in both, scales under Quark's name", QUARKS_NAMES, "aiter-fp4-overlooked", {}),
    ("FP8 experts: the drafter", fp8("fp8-128-f32-scale"), "aiter-drafter-slots", dict.fromkeys(AITER[1:], "ffx")),
    ("Quark, MXFP4 in the drafter too", quark(), "aiter-drafter-slots", dict.fromkeys(AITER, "ffx")),
    (
        "V4.1 by Quark",
        Model(routed="mxfp4-u8", shared="mxfp4-u8", config={**V41, "quantization_config": QUARK}),
        "aiter-slots-unloaded",
        dict.fromkeys(AITER[1:], "xxx"),
    ),
    (
        "the official V4.1: its shared experts stay FP8 in 0.33",
        Model(config={**V41, "quantization_config": {**FP8, "weight_block_size": [32, 32], "expert_dtype": "fp4"}}),
        "aiter-slots-unloaded",
        dict.fromkeys(AITER[1:4], "xxx"),
    ),
    (
        "V4.1 in FP8",
        Model(
            routed="fp8-32",
            config={**V41, "expert_dtype": "fp8", "quantization_config": {**FP8, "weight_block_size": [32, 32]}},
        ),
        "aiter-fp8-block",
        dict.fromkeys(AITER[2:], "xxx"),
    ),
    ("V4 in FP8", fp8("fp8-128-f32-scale"), "aiter-fp8-block", {}),
    ("no expert_dtype", fp8("fp8-128-f32-scale", expert_dtype="fp4"), "expert-dtype-unread", dict.fromkeys(UNREAD, "xxx")),
    (
        "V4's expert_dtype in the wrong place",
        Model(
            routed="fp8-128-f32-scale",
            shared="fp8-128-f32-scale",
            config={"expert_dtype": "fp4", "quantization_config": {**FP8, "expert_dtype": "fp8"}},
        ),
        "expert-dtype-unread",
        dict.fromkeys(UNREAD, "xxx"),
    ),
    ("V4's expert_dtype where it is read", fp8("fp8-128-f32-scale"), "expert-dtype-unread", {}),
    (
        "Quark excludes BF16 by a glob",
        quark("bf16", exclude=["*shared_experts*"]),
        "quark-exclude-glob",
        dict.fromkeys(AITER, "xxx"),
    ),
    (
        "Quark excludes BF16 by names",
        quark("bf16", exclude=["re:.*shared_experts.*"]),
        "quark-exclude-glob",
        {},
    ),
    (
        "V4.1: Quark excludes BF16 by names, which 0.30 does not rename and so does not find",
        Model(routed="mxfp4-u8", shared="bf16", config={**V41, "quantization_config": {**QUARK, "exclude": SHARED_NAMES}}),
        "quark-exclude-glob",
        {},
    ),
    (
        "Quark says alike, stored otherwise",
        quark("bf16"),
        "aiter-storage-differs",
        dict.fromkeys(AITER, "xxu"),  # the drafter fails for another reason
    ),
    ("Quark, MXFP4 under its other label", quark("mxfp4-u8", routed="mxfp4"), "aiter-storage-differs", {}),
    ("Quark's MXFP4 scales typed E8M0", quark("mxfp4", routed="mxfp4"), "quark-e8m0-typed", dict.fromkeys(SLOTS, "xxx")),
    ("Quark's MXFP4 scales as bytes", quark(), "quark-e8m0-typed", {}),
    ("Quark says alike, BF16 goes into a slot", quark("bf16"), "slot-storage-differs", dict.fromkeys(SLOTS, "xxx")),
    ("Quark excludes BF16", quark("bf16", exclude=["re:.*shared_experts.*"]), "slot-storage-differs", {}),
    ("native MXFP4 in both", NATIVE_FP4, "slot-scale-lost", dict.fromkeys(SLOTS, "xxx")),
    ("native MXFP4 beside FP8", Model(shared="fp8-128"), "slot-scale-lost", {}),
    ("MXFP4 with U8 scales in both", quark(), "slot-scale-lost", {}),
    ("MXFP4 with U8 scales in both, not by Quark", QUARKS_NAMES, "slot-scale-lost", {}),
    ("MXFP4 under native names by Quark", quark("mxfp4", routed="mxfp4"), "slot-scale-lost", {}),
    ("native MXFP4 in both, too wide for a slot", replace(NATIVE_FP4, shared_width=512), "slot-scale-lost", {}),
    (
        "Quark keys that are regular expressions",
        quark("mxfp4-u8", "fp8-128-quark", layer_quant_config=REGULAR),
        "quark-modules-misread",
        {
            **dict.fromkeys(AITER[2:], "ffx"),
            **dict.fromkeys(FHMOE[1:], "uux"),
            **dict.fromkeys(SLOTS, "ffx"),
            **dict.fromkeys(MEGA, "ffx"),
        },
    ),
]


@pytest.mark.parametrize(("model", "code", "expected"), [c[1:] for c in CASES], ids=[f"{c[2]}: {c[0]}" for c in CASES])
def test_what_is_unsafe_where(model: Model, code: str, expected: dict[str, str]) -> None:
    assert without_kernel(unsafe(model.subject(), code)) == without_kernel(expected)


def without_kernel(letters: dict[str, str]) -> dict[str, str]:
    """Leave out the targets with the heterogeneous kernel, which answer as those without it where it is not taken."""
    return {name: found for name, found in letters.items() if "fhmoe" not in name}


def named(*, exact: bool = True, twins: bool = True) -> Subject:
    """The factory's Quark checkpoint: FP8 attention and drafter, every module named."""
    spec = make_spec("quark-mxfp4", hidden=512, width=256, layers=2, experts=2, vocab=64)
    tensors: Tensors = {e.name: (e.dtype, tuple(e.shape)) for group in spec.traits.groups(spec) for e in group}
    quantization = spec.config["quantization_config"]
    layers = quantization["layer_quant_config"]
    if not twins:
        layers = {name: scheme for name, scheme in layers.items() if not name.startswith("layers.2.")}
    if not exact:
        layers = {"re:" + name.replace(".", r"\."): scheme for name, scheme in layers.items()}
    return subject_of({**spec.config, "quantization_config": {**quantization, "layer_quant_config": layers}}, tensors)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        (named(), dict.fromkeys(SLOTS[:2], "xxx")),
        (
            named(twins=False),
            {**dict.fromkeys(AITER[2:4], "ffx"), **dict.fromkeys(FHMOE[1:3], "uux"), **dict.fromkeys(SLOTS[:2], "xxx")},
        ),
        (named(exact=False), dict.fromkeys([*AITER[2:], *FHMOE[1:], *MEGA, *SLOTS], "xxx")),
    ],
    ids=["named exactly, with twins", "without twins", "by regular expressions"],
)
def test_quark_modules_that_a_server_does_not_find(about: Subject, expected: dict[str, str]) -> None:
    assert without_kernel(unsafe(about, "quark-modules-misread")) == without_kernel(expected)


def test_modules_of_v41_by_quark_are_not_judged_in_vllm_whose_loader_fails_before() -> None:
    """Every layer of V4.1 fails by `aiter-slots-unloaded`; unfused it was not run."""
    model = quark("mxfp4-u8", "fp8-128-quark", layer_quant_config=REGULAR)
    assert "vllm-0.33-aiter" in unsafe(model.subject(), "quark-modules-misread")
    found = unsafe(replace(model, config={**model.config, **V41}).subject(), "quark-modules-misread")
    assert [name for name in found if "aiter" in name] == []


def test_sglang_loads_the_first_layer_of_the_drafter_alone() -> None:
    """NextN has one block, of mtp.0 (0.5.23 models/deepseek_v4_nextn.py): modules of mtp.1 are not built, so not misread."""
    named = {f"mtp.0.ffn.shared_experts.w{n}": FP8_SPEC for n in (1, 2, 3)}
    for entries, expected in ((named, []), ({}, [2])):
        model = replace(quark("mxfp4-u8", "fp8-128-quark", layer_quant_config=entries), mtp=2)
        found = answers(model.subject())
        for name in SLOTS[2:]:
            misread = [i for i, v in enumerate(found[name].layers) if "quark-modules-misread" in {r.code for r in v.reasons}]
            assert misread == expected


def test_the_factorys_quark_checkpoint_fuses_in_the_main_layers_and_not_in_the_drafter() -> None:
    found = answers(named())
    letters = {name: "".join(v.outcome.value[0] for v in found[name].layers) for name in (*AITER[2:], *SLOTS[2:])}
    assert letters == dict.fromkeys(letters, "ffu")


def glm(shared: str, quantization: dict[str, Any]) -> Subject:
    tensors: Tensors = {}
    for prefix, store in (("experts.0", "mxfp4-u8"), ("shared_experts", shared)):
        tensors |= expert(f"model.layers.0.mlp.{prefix}", store, 256, 512, PROJ)
    config = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_hidden_layers": 1, "n_shared_experts": 1}
    return subject_of({**config, "quantization_config": quantization}, tensors)


def test_sglang_puts_bf16_into_mxfp4_slots_of_glm() -> None:
    excluded = {**QUARK, "exclude": ["re:.*shared_experts.*"]}
    assert unsafe(glm("bf16", excluded), "slot-unchecked") == dict.fromkeys(SLOTS, "x")
    assert unsafe(glm("mxfp4-u8", QUARK), "slot-unchecked") == {}


def test_blocks_that_some_kernels_of_sglang_misread_are_a_condition_of_its_row() -> None:
    small = {**V41, "expert_dtype": "fp8", "quantization_config": {**FP8, "weight_block_size": [32, 32]}}
    for model, types, narrow in (
        (Model(routed="fp8-32", config=small), SLOTS[-1:], True),
        (fp8("fp8-128-f32-scale"), SLOTS, False),
    ):
        found = answers(model.subject())
        for name in types:
            assert found[name].fused
            assert ("--moe-a2a-backend none, CUDA" in found[name].started_with) == narrow
            assert [n.code for n in found[name].notes] == ["sglang-block-32"] * narrow
        assert found["atom"].started_with == "ROCm; ATOM_FUSE_SHARED_EXPERT not 0"


def test_slots_with_small_blocks_are_known_of_the_release_that_was_run() -> None:
    small = {**V41, "expert_dtype": "fp8", "quantization_config": {**FP8, "weight_block_size": [32, 32]}}
    found = answers(Model(routed="fp8-32", config=small).subject())
    assert {found[name].model.outcome for name in ("sglang-0.5.21-slots", "sglang-0.5.22-slots")} == {Outcome.UNKNOWN}


def test_a_server_that_refuses_still_says_what_would_go_wrong() -> None:
    """vLLM's MegaMoE raises for FP8 experts; without MegaMoE it starts, and reads their scales wrongly."""
    refused, sound = (answers(fp8(store).subject())["vllm-0.33"].model for store in ("fp8-128", "fp8-128-f32-scale"))
    assert refused.outcome is sound.outcome is Outcome.REFUSED
    assert [r.code for r in refused.reasons] == [*(r.code for r in sound.reasons), "fp8-e8m0-scales"]


PRO = Model(
    hidden=7168, width=3072, shared="fp8-128", layers=1, mtp=0,
    config={"n_routed_experts": 384, "num_experts_per_tok": 6, "hidden_act": "silu", "topk_method": "noaux_tc"},
)  # fmt: skip


def test_the_heterogeneous_kernel_fuses_v4_pro_as_published() -> None:
    found = answers(PRO.subject())
    assert {name: found[name].fused for name in found if "fhmoe" in name} == dict.fromkeys(FHMOE, True)
    assert "gfx950, TP 8" in found[FHMOE[0]].started_with


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(PRO, width=2048), "moe_intermediate_size is not 3072"),
        (replace(PRO, hidden=4096), "hidden_size is not 7168"),
        (replace(PRO, config={**PRO.config, "n_routed_experts": 256}), "n_routed_experts is not 384"),
        (replace(PRO, config={**PRO.config, "expert_dtype": None}), "expert_dtype is not 'fp4'"),
        (replace(PRO, config={**PRO.config, "topk_method": "greedy"}), "topk_method is not 'noaux_tc'"),
        (
            replace(PRO, config={**PRO.config, "quantization_config": {**FP8, "ignored_layers": ["head"]}}),
            "the quantization config has ignored layers",
        ),
        (
            replace(PRO, config={**PRO.config, "quantization_config": {**FP8, "weight_block_size": [32, 32]}}),
            "shared experts are not block-128 FP8",
        ),
        (
            replace(PRO, config={**PRO.config, "quantization_config": {**FP8, "moe_quant_algo": "NVFP4"}}),
            "routed experts use NVFP4",
        ),
        (
            replace(PRO, routed="mxfp4-u8", shared="mxfp4-u8", config={**PRO.config, "quantization_config": QUARK}),
            "the DeepSeek V4 FP8 quantization config is not active",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_heterogeneous_kernel_is_for_v4_pro_alone(model: Model, message: str) -> None:
    found = answers(model.subject())
    taken, plain = found["vllm-0.33-aiter-fhmoe"], found["vllm-0.33-aiter"]
    assert (taken.layers, taken.model) == (plain.layers, plain.model)
    assert message in "; ".join(n.message for n in taken.notes if n.code == "aiter-heterogeneous")


@pytest.mark.parametrize("shared", ["fp8-128-f32-scale", "fp8-32", "mxfp4"])
def test_the_heterogeneous_kernel_needs_the_tensors_that_the_config_tells_of(shared: str) -> None:
    quantized = {**PRO.config, "quantization_config": FP8}
    found = unsafe(replace(PRO, shared=shared, config=quantized).subject(), "aiter-storage-differs")
    assert {name: found.get(name) for name in FHMOE} == dict.fromkeys(FHMOE, "x")


def test_the_drafter_of_v4_pro_is_judged_without_the_heterogeneous_kernel() -> None:
    found = answers(replace(PRO, mtp=1).subject())
    letters = {name: "".join(v.outcome.value[:3] for v in found[name].layers) for name in FHMOE}
    assert letters == {**dict.fromkeys(FHMOE[:3], "fusuns"), **dict.fromkeys(FHMOE[3:], "fusunf")}


def hashed(config: dict[str, Any]) -> Subject:
    """Two layers, the first of which routes by a table."""
    model = Model(layers=2, mtp=0, shared="fp8-128", config=config)
    beside: Tensors = {"layers.0.ffn.gate.tid2eid": ("I64", (8, 1)), "layers.1.ffn.gate.bias": ("F32", (2,))}
    return subject_of(model.full_config(), model.tensors() | beside)


def test_every_row_has_a_way_out_a_source_and_a_case_of_its_own() -> None:
    rows = [(row.code, row.hint) for row in (*HAZARDS, *LAST)]
    assert all(row.hint and row.source for row in (*HAZARDS, *LAST))
    assert len(set(rows)) == len(rows), "rows of one code differ in the way out, or no case can tell which of them applied"
    excluded = glm("bf16", {**QUARK, "exclude": ["re:.*shared_experts.*"]})
    different = replace(PRO, shared="fp8-32", config={**PRO.config, "quantization_config": FP8}).subject()
    tried = [
        *(case[1].subject() for case in CASES),
        named(),
        excluded,
        different,
        numbered_on("deepseek_v3", (2,), {NEXTN: 0}),
        hashed({}),
    ]
    told = {(r.code, r.hint) for about in tried for answer in judge(about) for v in answer.layers for r in v.reasons}
    assert [row for row in rows if row not in told] == []


NEXTN = "num_nextn_predict_layers"
CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}  # fmt: skip


def numbered_on(model_type: str, mtp: tuple[int, ...], config: dict[str, Any]) -> Subject:
    """Two decoder layers in FP8, and MTP layers of these numbers."""
    tensors: Tensors = {}
    for i in (0, 1, *mtp):
        for module in ("experts.0", "experts.1", "shared_experts"):
            tensors |= expert(f"model.layers.{i}.mlp.{module}", "fp8-128", 256, 512, PROJ)
    tensors |= {f"model.layers.{i}.enorm.weight": ("BF16", (512,)) for i in mtp}
    quant = {k: v for k, v in FP8.items() if k != "scale_fmt"}
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 2, "n_shared_experts": 1, "num_hidden_layers": 2}
    model = {"model_type": model_type, "architectures": [CLASSES[model_type]], "first_k_dense_replace": 0}
    return subject_of({**model, **sizes, "quantization_config": quant, **config}, tensors)


@pytest.mark.parametrize(
    ("model_type", "mtp", "config", "fails"),
    [
        ("deepseek_v3", (2,), {NEXTN: 0}, True),
        ("glm4_moe", (2,), {NEXTN: 0}, True),
        ("deepseek_v3", (2, 3), {NEXTN: 1}, True),
        ("deepseek_v3", (3,), {NEXTN: 1}, True),
        ("glm_moe_dsa", (2,), {}, True),
        ("deepseek_v3", (2,), {}, False),  # transformers' class takes 1
        ("deepseek_v3", (2,), {NEXTN: 1}, False),
        ("deepseek_v3", (2,), {"num_mtp_layers": 1}, False),
        ("glm4_moe", (2, 3), {NEXTN: 2}, False),
        ("deepseek_v3", (), {NEXTN: 0}, False),
    ],
)
def test_vllm_takes_mtp_layers_that_are_not_promised_for_layers_of_the_model(
    model_type: str, mtp: tuple[int, ...], config: dict[str, Any], *, fails: bool
) -> None:
    about = numbered_on(model_type, mtp, config)
    every = "x" * len(about.description.layers)
    assert set(AITER) <= {name for name, answer in answers(about).items() if answer.fused or fails}
    assert unsafe(about, "mtp-unskipped") == (dict.fromkeys(AITER, every) if fails else {})
    told = [c.message for c in about.description.conflicts if c.code == "mtp-unskipped"]
    assert [f"but layer {max(mtp)} is an MTP layer" in message for message in told] == [True] * fails


def test_a_drafter_without_its_first_layer_is_short_however_many_there_are() -> None:
    model = Model(mtp=2, config={NEXTN: 1})
    about = subject_of(model.full_config(), {n: t for n, t in model.tensors().items() if not n.startswith("mtp.0.")})
    assert "vllm-0.33" in unsafe(about, "drafter-short")
    assert [c.message for c in about.description.conflicts] == [f"{NEXTN} is 1, but no tensor is of MTP layer 0"]


KEY, WORDS = "first_k_dense_replace", "mlp_layer_types"


@pytest.mark.parametrize(
    ("model_type", "from_layer", "config", "fails"),
    [
        ("glm_moe_dsa", 1, {KEY: 3, WORDS: ["dense", "sparse", "sparse", "sparse"]}, True),
        ("glm_moe_dsa", 1, {KEY: 1, WORDS: ["dense", "sparse", "sparse", "sparse"]}, False),
        ("glm_moe_dsa", 1, {KEY: 0, WORDS: ["dense", "sparse", "sparse", "sparse"]}, True),
        ("glm_moe_dsa", 1, {}, True),
        ("glm_moe_dsa", 3, {}, False),
        ("deepseek_v3", 1, {}, True),
        ("deepseek_v3", 3, {}, False),
        ("glm4_moe", 3, {WORDS: ["dense", "dense", "dense", "sparse"]}, True),
        ("glm4_moe", 1, {}, False),
    ],
)
def test_vllm_reads_no_list_of_the_layers_with_experts(
    model_type: str, from_layer: int, config: dict[str, Any], *, fails: bool
) -> None:
    tensors: Tensors = {}
    for i in range(from_layer, 4):
        for module in ("experts.0", "experts.1", "shared_experts"):
            tensors |= expert(f"model.layers.{i}.mlp.{module}", "fp8-128", 256, 512, PROJ)
    model = numbered_on(model_type, (), {"num_hidden_layers": 4, NEXTN: 0, KEY: None}).config
    about = subject_of({k: v for k, v in {**model, **config}.items() if v is not None}, tensors)
    assert about.description.conflicts == about.description.gaps == ()
    assert unsafe(about, "dense-layers-differ") == (dict.fromkeys(AITER, "x" * (4 - from_layer)) if fails else {})
    assert set(AITER) <= {name for name, answer in answers(about).items() if answer.fused or fails}


@pytest.mark.parametrize(
    ("config", "fails"),
    [
        ({"num_hash_layers": 1}, False),
        ({"num_hash_layers": 1, WORDS: ["hash_moe", "moe"]}, False),
        ({"num_hash_layers": 1, WORDS: ["moe", "moe"]}, True),
        ({"num_hash_layers": 1, WORDS: ["moe", "hash_moe"]}, False),
        ({"num_hash_layers": None}, True),
    ],
)
def test_vllm_counts_the_layers_that_route_by_a_table(config: dict[str, Any], *, fails: bool) -> None:
    about = hashed(config)
    assert about.description.conflicts == ()
    told = unsafe(about, "hash-layers-differ")
    assert ({"vllm-0.33", "vllm-0.33-aiter"} <= set(told)) is fails
    assert all(name.startswith("vllm-0.33") for name in told)
    assert answers(about)["vllm-0.33"].fused is not fails
