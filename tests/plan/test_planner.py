"""What a conversion refuses to plan, with a reason: families whose experts would be padded wrongly, or into a config that lies."""

from __future__ import annotations

from typing import Any

import pytest

from fse_convert.errors import FseConvertError, InvalidCheckpoint, NotConvertible
from fse_convert.plan.plan import Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import describe_source
from fse_convert.servers.targets import find_target
from fse_convert.testing.memory import PROJ, Tensors, W, checkpoint, expert

HIDDEN, WIDTH = 512, 384
MLP = "model.layers.{}.mlp"
SPARSE = "language_model.model.layers.{}.block_sparse_moe"
COUNT = {"n_routed_experts": 2, "n_shared_experts": 1, "moe_intermediate_size": WIDTH}
OWN = {"num_experts": 2, "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}


def tensors_of(block: str = MLP, routed: tuple[str, str, str] = PROJ, shared: str = "shared_experts", **sizes: Any) -> Tensors:
    """Two layers in the formats that the kernel takes."""
    found: Tensors = {}
    for i in range(2):
        for e in range(2):
            found |= expert(f"{block.format(i)}.experts.{e}", "mxfp4", WIDTH, sizes.get("latent", HIDDEN), routed)
        if shared:
            found |= expert(f"{block.format(i)}.{shared}", "fp8-32", sizes.get("shared_width", WIDTH), HIDDEN, PROJ)
    return found


def plan(config: dict[str, Any], tensors: Tensors, **options: Any) -> Plan:
    target = find_target("megamoe-512")
    assert target is not None
    made = checkpoint({"num_hidden_layers": 2, **config}, tensors)
    return make_plan(describe_source(made), Options(target, **options))


def refused(config: dict[str, Any], tensors: Tensors, **options: Any) -> FseConvertError:
    with pytest.raises(FseConvertError) as e:
        plan(config, tensors, **options)
    return e.value


def test_a_plain_model_is_padded_and_its_config_edited() -> None:
    found = plan({"model_type": "deepseek_v3", **COUNT}, tensors_of())
    assert [(e.key, e.old, e.new) for e in found.decision.config_edits] == [("moe_intermediate_size", 384, 512)]
    assert found.decision.fused_layers == 2


def test_two_widths_in_the_config_are_both_edited() -> None:
    config = {"num_local_experts": 2, "n_shared_experts": 1, "intermediate_size": WIDTH, "shared_intermediate_size": WIDTH}
    found = plan({"model_type": "minimax_m3", "text_config": config}, tensors_of(SPARSE, W))
    assert [(e.section, e.key, e.new) for e in found.decision.config_edits] == [
        ("text_config", "intermediate_size", 512),
        ("text_config", "shared_intermediate_size", 512),
    ]


def test_a_gated_shared_expert_does_not_fuse() -> None:
    tensors = tensors_of(shared="shared_expert")
    tensors |= {f"{MLP.format(i)}.shared_expert_gate.weight": ("BF16", (1, HIDDEN)) for i in range(2)}
    error = refused({"model_type": "qwen3_next", **OWN}, tensors)
    assert isinstance(error, NotConvertible)
    assert [p.code for p in error.problems] == ["not-fusable", "shared-gated"]


@pytest.mark.parametrize("target", ["vllm-0.33", "sglang-0.5.23"])
def test_a_server_without_a_path_for_the_model_blames_no_format(target: str) -> None:
    """Its kernel would not take these formats either; inspect names the model alone."""
    plain = {
        n: t
        for i in range(2)
        for m in ("experts.0", "shared_experts")
        for n, t in expert(f"{MLP.format(i)}.{m}", "bf16", WIDTH, HIDDEN, PROJ).items()
    }
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, **COUNT, "n_routed_experts": 1, "hidden_size": HIDDEN}
    with pytest.raises(NotConvertible) as e:
        make_plan(describe_source(checkpoint(config, plain)), Options(find_target(target)))
    assert [p.code for p in e.value.problems] == ["not-fusable", "model-unsupported"]


def test_latent_experts_do_not_fuse() -> None:
    config = {"num_experts": 2, "num_shared_experts": 1, "moe_intermediate_size": WIDTH}
    tensors = tensors_of(SPARSE, W, latent=256)
    tensors |= {f"{SPARSE.format(i)}.routed_expert_down_proj.weight": ("BF16", (256, HIDDEN)) for i in range(2)}
    error = refused({"model_type": "kimi_k3", "text_config": config}, tensors)
    assert isinstance(error, NotConvertible)
    assert [p.code for p in error.problems] == ["not-fusable", "hidden-differs"]


def test_stacked_experts_are_not_understood_in_a_family_that_has_none() -> None:
    tensors: Tensors = {}
    for i in range(2):
        tensors[f"{MLP.format(i)}.experts.gate_up_proj"] = ("BF16", (2, 2 * WIDTH, HIDDEN))
        tensors |= expert(f"{MLP.format(i)}.shared_experts", "fp8-32", WIDTH, HIDDEN, PROJ)
    error = refused({"model_type": "deepseek_v3", **COUNT}, tensors)
    assert isinstance(error, InvalidCheckpoint)
    assert {p.code for p in error.problems} == {"experts-stacked"}


@pytest.mark.parametrize(("stored", "padded"), [(128, 512), (512, 512), (576, 1024), (768, 1024), (1152, 1536)])
def test_a_shared_width_of_its_own_grows_to_a_multiple_of_the_routed_one(stored: int, padded: int) -> None:
    config = {"model_type": "laguna", **OWN, "shared_expert_intermediate_size": stored}
    found = plan(config, tensors_of(shared="shared_expert", shared_width=stored))
    assert {e.key: e.new for e in found.decision.config_edits if e.new != e.old} == {
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": padded,
    } if padded != stored else {"moe_intermediate_size": 512}  # fmt: skip
    assert found.decision.fused_layers == 2
    assert {s.shared.width for shard in found.sidecar for s in (t.change for t in shard.kernel_tensors)} == {padded}  # type: ignore[union-attr]


def test_shared_experts_of_different_layers_that_differ_in_width_are_refused() -> None:
    tensors = tensors_of(shared="shared_expert")
    tensors |= expert("model.layers.1.mlp.shared_expert", "fp8-32", 512, HIDDEN, PROJ)
    error = refused({"model_type": "laguna", **OWN}, tensors)
    assert [p.code for p in error.problems] == ["widths-differ"]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"moe_intermediate_size": 512}, "config-width"),
        ({"n_shared_experts": 2}, "config-width"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "config-block"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(config: dict[str, Any], code: str) -> None:
    error = refused({"model_type": "deepseek_v3", **COUNT, **config}, tensors_of())
    assert isinstance(error, InvalidCheckpoint)
    assert code in [p.code for p in error.problems]


def test_experts_outside_the_known_blocks_would_stay_at_their_width() -> None:
    tensors = tensors_of() | expert("model.mtp_layers.0.mlp.experts.0", "mxfp4", WIDTH, HIDDEN, PROJ)
    error = refused({"model_type": "hy_v4", **COUNT}, tensors)
    assert isinstance(error, InvalidCheckpoint)
    assert [p.code for p in error.problems] == ["expert-outside"]
    assert "model.mtp_layers.0.mlp.experts.0" in error.problems[0].where


def test_an_unknown_family_is_refused() -> None:
    error = refused({"model_type": "newcomer"}, tensors_of())
    assert [p.code for p in error.problems] == ["family-unknown"]
