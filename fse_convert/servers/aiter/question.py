"""Whether vLLM on ROCm appends the shared expert to the routed ones: AITER fused shared experts (FSE), releases 0.29 to 0.33.

The rules of ``is_shared_expert_quant_fse_compatible`` (quantization/utils/config_utils.py),
``resolve_layer_fused_shared_expert`` and ``is_model_fused_shared_expert_compatible`` (fused_moe/utils.py), in their
order. They look at configs only, never at tensors, and run only where VLLM_ROCM_USE_AITER, VLLM_ROCM_USE_AITER_MOE and
VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS are set. Messages of refusals are vLLM's own, so that they are found in its log.
This is another question than fusion in NVIDIA's MegaMoE kernel (`fusion.megamoe`).

A rule that a release has and this module does not: "online quantization excludes FSE weights at ..." (0.32, 0.33). It cannot be
reached, because a projection without an online method already counts as not targeted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fse_convert.model.quantization import read_quantization
from fse_convert.servers.aiter.families import AiterFamily, find_aiter_family
from fse_convert.servers.aiter.online import OnlineQuantization
from fse_convert.servers.aiter.patterns import PatternUnclearError, Renames, ServerError
from fse_convert.servers.aiter.rules import MEGA_MOE, AiterQuestion, AiterRules, NotFusedError
from fse_convert.servers.aiter.vllm_config import NEWEST, ConfigUnclearError, Kind, VllmRelease, build_vllm_quant, is_since
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict

__all__ = [
    "PROJECTIONS",
    "AiterLayer",
    "AiterQuestion",
    "ask_aiter",
    "doubts",
    "judge",
    "judge_block",
    "judge_decoder_layer",
    "judge_model",
    "judge_mtp_layer",
    "log_line",
]

PROJECTIONS = ("gate_up_proj", "down_proj")
SWITCH = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"


@dataclass(frozen=True, slots=True)
class AiterLayer:
    """The answer for one MoE block: its prefix in the server's module tree, the verdict, and the line in the server's log."""

    block: str
    verdict: Verdict
    log: str


def ask_aiter(
    config: Mapping[str, Any],
    quant_config: Mapping[str, Any] | None = None,
    *,
    release: VllmRelease = NEWEST,
    family: AiterFamily | None = None,
    moe_backend: str | None = None,
    online: OnlineQuantization | None = None,
    requested: str | None = None,
) -> AiterQuestion | None:
    """Put the question for a checkpoint's config.json and ``hf_quant_config.json``; None where the model class is not known.

    ``requested`` is the value of ``--quantization``.
    """
    family = family or find_aiter_family(config)
    if family is None:
        return None
    quant = build_vllm_quant(read_quantization(config, quant_config), str(config.get("model_type", "")), release, requested)
    if config.get("quantization_config") is None and quant_config is not None:
        config = {**config, "quantization_config": quant_config}  # as transformers_utils/config.py does
    return AiterQuestion(config, family, quant, release, moe_backend, online)


def judge_decoder_layer(question: AiterQuestion, index: int) -> AiterLayer:
    """Judge the MoE block of decoder layer ``index``."""
    return judge_block(question, question.family.block.format(index=index))


def judge_mtp_layer(question: AiterQuestion, k: int) -> AiterLayer:
    """Judge the MoE block of drafter layer ``k`` (``mtp.k`` in a DeepSeek-V4 checkpoint)."""
    family, release = question.family, question.release
    layers = question.read("num_hidden_layers", None)
    if not isinstance(layers, int):
        unknown = Verdict(Outcome.UNKNOWN, (Reason("aiter-config-unclear", "config.json has no num_hidden_layers"),))
        return AiterLayer(family.mtp_block, unknown, "")
    if family.mtp_names and release.mtp_names:
        drafter = Renames(prefixes=((f"model.mtp.{k}.", f"model.layers.{layers + k}."),))
        prefixes = family.renames.prefixes + drafter.prefixes
        question = replace(question, family=replace(family, renames=replace(family.renames, prefixes=prefixes)))
    return judge_block(question, family.mtp_block.format(k=k, next=layers + k))


def judge_block(question: AiterQuestion, block: str, projections: Sequence[str] = PROJECTIONS) -> AiterLayer:
    """Judge one MoE block by its prefix in the server's module tree, such as ``model.layers.3.mlp``."""
    verdict = judge(question, f"{block}.experts", f"{block}.{question.family.shared}", projections)
    return AiterLayer(block, verdict, log_line(question, verdict))


def judge(question: AiterQuestion, experts: str, shared: str, projections: Sequence[str] = PROJECTIONS) -> Verdict:
    """Judge one pair of routed and shared experts by their module prefixes; never raises."""
    family, quant = question.family, question.quant
    if family.since is None or not is_since(question.release.name, family.since):
        message = f"vLLM {question.release.name} does not fuse shared experts of {family.name} this way"
        return Verdict(Outcome.UNFUSED, (Reason("aiter-family-unsupported", message),))
    if quant.error:
        return Verdict(Outcome.ERROR, (Reason("aiter-config-refused", quant.error),))
    if quant.unsure:
        return Verdict(Outcome.UNKNOWN, (Reason("aiter-config-unclear", quant.unsure),))
    try:
        AiterRules(question, experts, shared, tuple(projections)).run()
    except NotFusedError as no:
        return Verdict(Outcome.UNFUSED, (no.reason,))
    except ServerError as error:
        return Verdict(Outcome.ERROR, (Reason(error.code, str(error)),))
    except (PatternUnclearError, ConfigUnclearError) as unclear:
        return Verdict(Outcome.UNKNOWN, (Reason("aiter-config-unclear", str(unclear)),))
    return FUSED


def judge_model(layers: Iterable[Verdict]) -> Verdict:
    """Judge the MoE layers of one model together: vLLM refuses to fuse some and not others.

    ``is_model_fused_shared_expert_compatible`` of fused_moe/utils.py. A drafter (MTP) is a model of its own.
    """
    verdicts = list(layers)
    for outcome in (Outcome.ERROR, Outcome.UNKNOWN):
        stopped = [verdict for verdict in verdicts if verdict.outcome is outcome]
        if stopped:
            return stopped[0]
    enabled = sum(verdict.fused for verdict in verdicts)
    disabled = len(verdicts) - enabled
    if enabled and disabled:
        message = (
            f"Fused shared experts must be enabled for all MoE layers; found {enabled} enabled and {disabled} disabled "
            "layers. Per-layer fused shared experts is not yet supported. Please open an issue."
        )
        return Verdict(Outcome.ERROR, (Reason("aiter-model-mixed", message, f"serve with {SWITCH}=0"),))
    if enabled:
        return FUSED
    reasons = tuple(dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons))
    return Verdict(Outcome.UNFUSED, reasons or (Reason("aiter-no-moe-layers", "there is no MoE layer"),))


def log_line(question: AiterQuestion, verdict: Verdict) -> str:
    """Return the warning that vLLM logs for a layer, empty where it logs none.

    fused_moe/utils.py; DeepSeek-V4's and MiniMax-M3's AMD models log themselves.
    """
    if verdict.outcome is not Outcome.UNFUSED or verdict.reasons[0].code == "aiter-family-unsupported":
        return ""
    skipping = question.release.skip_wording and (not question.family.own_log or question.moe_backend == MEGA_MOE)
    middle = " - skipping for this layer" if skipping else ""
    return f"{SWITCH} is enabled but cannot be enabled{middle}: {verdict.reasons[0].message}."


def doubts(question: AiterQuestion) -> tuple[Reason, ...]:
    """Return what vLLM's rules overlook in this checkpoint: a layer judged as fused may still fail or compute wrongly."""
    quant, release = question.quant, question.release
    found = []
    overlooked = quant.kind is Kind.FP8 and quant.class_name == "DeepseekV4FP8Config"
    if overlooked and not quant.from_quark and question.read("expert_dtype", "fp4") == "fp4":
        message = (
            f"vLLM {release.name} judges DeepSeek-V4 on ROCm by its FP8 rule, which does not see that routed experts are "
            "MXFP4 and shared experts FP8"
        )
        found.append(Reason("aiter-fp4-overlooked", message, f"serve with {SWITCH}=0, or with vLLM 0.33"))
    layers = quant.quark.get("layer_quant_config")
    unread = [key for key in layers if key.startswith("re:")] if isinstance(layers, Mapping) else []
    if unread:
        message = f"vLLM does not read the {len(unread)} entries of layer_quant_config that start with re:, such as {unread[0]}"
        found.append(Reason("aiter-quark-regex-unread", message, "those modules count as having the global scheme"))
    return tuple(found)
