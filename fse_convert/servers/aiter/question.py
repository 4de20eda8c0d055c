"""AITER fused shared experts (FSE): vLLM on ROCm, releases 0.29 to 0.33, appends the shared expert to the routed ones.

The rules of ``is_shared_expert_quant_fse_compatible`` (quantization/utils/config_utils.py),
``resolve_layer_fused_shared_expert`` and ``is_model_fused_shared_expert_compatible`` (fused_moe/utils.py), in their
order. They look at configs only, never at tensors, and run only where VLLM_ROCM_USE_AITER, VLLM_ROCM_USE_AITER_MOE and
VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS are set. Messages of refusals are vLLM's own, so that they are found in its log.
This is another question than fusion in NVIDIA's MegaMoE kernel (`fse_convert.servers.native`).

With AITER MegaMoE (``--moe-backend aiter_mega_moe``) vLLM fuses shared experts only if it may requantise them to MXFP4 while
loading, so that target is a server that is started with ``--quantization-config.targets`` for them. Only DeepSeek-V4's class
has that backend; V4.1's switches it off (0.33 models/deepseek_v41/amd/model.py:142).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fse_convert.errors import counted
from fse_convert.model.description import LayerDescription
from fse_convert.model.formats import StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.model.quantization import Quantization
from fse_convert.servers.aiter.families import find_aiter_family
from fse_convert.servers.aiter.heterogeneous import objections
from fse_convert.servers.aiter.patterns import VerdictError
from fse_convert.servers.aiter.quant_compatible import AiterQuestion, AiterRules
from fse_convert.servers.aiter.vllm_config import NEWEST, RELEASES, VllmQuantKind, VllmRelease, build_vllm_quant
from fse_convert.servers.release_names import is_since
from fse_convert.servers.subject import vllm_class_names
from fse_convert.servers.verdict import FUSED, NO_SHARED_EXPERT, Outcome, Reason, Verdict, because, not_understood

LAYER_NUMBER = re.compile(r"\b(layers|mtp)\.\d+\b")
DRAFT_EXPORT = "NextN"
"""How class names of drafts end that are exported for SGLang; vLLM has none of them."""
SWITCH = "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"
SWITCHES = "ROCm, VLLM_ROCM_USE_AITER=1, ..._MOE=1, ..._FUSION_SHARED_EXPERTS=1"
MEGA_MOE = (
    '--moe-backend aiter_mega_moe, --quantization-config.targets \'{"*shared_experts*": "mxfp4"}\', gfx950, TP 1, PP 1, '
    "DP with EP, --all2all-backend mori_*, no EPLB"
)
"""Flags and hardware that 0.33 models/deepseek_v4/amd/model.py:552-582 asks for."""
HETEROGENEOUS = "gfx950, TP 8, no EP, EPLB, DP or PCP, --moe-backend aiter, BF16, no weight offloading"
"""What 0.33 models/deepseek_v4/amd/model.py:232-300 asks of the machine (0.30:217-285 the same)."""


@dataclass(frozen=True)
class AiterTarget:
    """A vLLM release on ROCm. ``mega_moe``: started with the backend AITER MegaMoE. ``heterogeneous``: on the hardware of FHMoE.

    ``conditions``: what the class of a model that was asked about needs beside flags and hardware.
    """

    name: str
    rules: VllmRelease
    mega_moe: bool = False
    heterogeneous: bool = False
    conditions: tuple[str, ...] = ()
    engine: str = "vLLM ROCm"
    source: str = "model_executor/layers/quantization/utils/config_utils.py (is_shared_expert_quant_fse_compatible)"

    @property
    def release(self) -> str:
        """The release's number."""
        return self.rules.name

    @property
    def started_with(self) -> str:
        """Flags, hardware and conditions."""
        more = (MEGA_MOE,) if self.mega_moe else (HETEROGENEOUS,) if self.heterogeneous else ()
        return ", ".join((SWITCHES, *more, *self.conditions))


FHMOE_SOURCE = "models/deepseek_v4/amd/model.py (_heterogeneous_shared_expert_enabled)"
AITER_TARGETS: tuple[AiterTarget, ...] = (
    *(AiterTarget(f"vllm-{n}-aiter", r) for n, r in RELEASES.items()),
    *(AiterTarget(f"vllm-{n}-aiter-mega", r, mega_moe=True) for n, r in RELEASES.items() if r.mega_moe),
    *(
        AiterTarget(f"vllm-{n}-aiter-fhmoe", r, heterogeneous=True, source=FHMOE_SOURCE)
        for n, r in RELEASES.items()
        if r.heterogeneous
    ),
)


def ask_aiter(
    config: Mapping[str, Any], quant_config: Mapping[str, Any] | None, quantization: Quantization, target: AiterTarget
) -> AiterQuestion | Verdict:
    """Put the question for a checkpoint's config.json and ``hf_quant_config.json``; the verdict where the release has no class."""
    family, names, server = find_aiter_family(config), vllm_class_names(config), f"vLLM {target.release}"
    if any(name.endswith(DRAFT_EXPORT) for name in names) or (family and not is_since(target.release, family.exists_since)):
        what = f"model class {names[0]}" if names else f"class for {config.get('model_type')!r}"
        return because(Outcome.REFUSED, "model-unsupported", f"{server} has no {what}")
    if family is None:
        message = f"no model class of vLLM {NEWEST} that is known to ask this has this architecture or type"
        return because(Outcome.UNKNOWN, "model-unsupported", message)
    quant = build_vllm_quant(quantization, str(config.get("model_type", "")), target.rules)
    if config.get("quantization_config") is None and quant_config is not None:
        config = {**config, "quantization_config": quant_config}  # as transformers_utils/config.py does
    question = AiterQuestion(config, family, quant, target.rules, target.mega_moe)
    if not target.heterogeneous:
        return question
    if not family.v4:
        message = f"{server} fuses this way for DeepSeek-V4 only, not for {family.name}"
        return because(Outcome.REFUSED, "model-unsupported", message)
    passed_over = tuple(objections(question))
    return replace(question, heterogeneous=not passed_over, passed_over=passed_over)


def judge_layer(question: AiterQuestion, layer: LayerDescription) -> Verdict:
    """Judge one layer of a checkpoint: by the config, as vLLM does; tensors that are not understood take a yes back.

    vLLM's messages name the layer; a reason is the same in every layer, so its number is left out.
    """
    if layer.layer.shared is None:
        return not_understood(layer.problems) if layer.problems else NO_SHARED_EXPERT
    if question.heterogeneous and layer.layer.kind is LayerKind.DECODER:
        return FUSED
    judge_kind = judge_mtp_layer if layer.layer.kind is LayerKind.MTP else judge_decoder_layer
    verdict = judge_kind(question, layer.layer.index)
    if verdict.fused and layer.problems:
        return not_understood(layer.problems)
    return replace(verdict, reasons=tuple(replace(r, message=LAYER_NUMBER.sub(r"\1.*", r.message)) for r in verdict.reasons))


def judge_decoder_layer(question: AiterQuestion, index: int) -> Verdict:
    """Judge the MoE block of decoder layer ``index``."""
    return judge_block(question, question.family.block.format(index=index))


def judge_mtp_layer(question: AiterQuestion, k: int) -> Verdict:
    """Judge the MoE block of drafter layer ``k`` (``mtp.k`` in a DeepSeek-V4 checkpoint)."""
    layers = question.decoder_layers
    if layers is None:
        return because(Outcome.UNKNOWN, "aiter-config-unclear", "config.json has no num_hidden_layers")
    return judge_block(drafter(question, k, layers), question.family.mtp_block.format(k=k, next=layers + k))


def drafter(question: AiterQuestion, k: int, layers: int) -> AiterQuestion:
    """Return the question with the renaming that the drafter applies for its layer ``k``, after ``layers`` decoder layers."""
    family = question.family
    if not (family.v4 and question.release.mtp_names):
        return question
    prefixes = (*family.renames.prefixes, (f"model.mtp.{k}.", f"model.layers.{layers + k}."))
    return replace(question, family=replace(family, renames=replace(family.renames, prefixes=prefixes)))


def judge_block(question: AiterQuestion, block: str) -> Verdict:
    """Judge one MoE block by its prefix in the server's module tree, such as ``model.layers.3.mlp``."""
    refused = _mega_moe_refusal(question) if question.mega_moe else None
    return refused or judge(question, f"{block}.experts", f"{block}.{question.family.shared}")


def _mega_moe_refusal(question: AiterQuestion) -> Verdict | None:
    """Apply what the model class asks beside the quantisation's rules (0.33 models/deepseek_v4/amd/model.py:552-590, 683-731)."""
    if not question.family.v4:
        message = f"vLLM {question.release.name} has AITER MegaMoE for DeepSeek-V4 only, not for {question.family.name}"
        return because(Outcome.REFUSED, "model-unsupported", message)
    if question.read("expert_dtype", "fp4") != "fp4":
        return because(Outcome.ERROR, "aiter-server-error", "AITER MegaMoE only supports fp4 experts.")
    if question.read("n_shared_experts", 1) != 1:
        return because(Outcome.UNFUSED, "aiter-shared-count", "AITER MegaMoE fuses exactly one shared expert per layer")
    if question.quant.kind is VllmQuantKind.NONE:
        return because(Outcome.ERROR, "aiter-server-error", "assert quant_config is not None")
    return None


def judge(question: AiterQuestion, experts: str, shared: str) -> Verdict:
    """Judge one pair of routed and shared experts by their module prefixes; never raises."""
    family, quant = question.family, question.quant
    if family.since is None or not is_since(question.release.name, family.since):
        message = f"vLLM {question.release.name} does not fuse shared experts of {family.name} this way"
        return because(Outcome.UNFUSED, "aiter-family-unsupported", message)
    if quant.instead:
        return quant.instead
    try:
        AiterRules(question, experts, shared).run()
    except VerdictError as error:
        return error.verdict
    return FUSED


def notes(question: AiterQuestion, layers: Sequence[LayerDescription], verdicts: Sequence[Verdict]) -> tuple[Reason, ...]:
    """Say what a fusion needs beside flags, where loading requantises shared experts to MXFP4, and which path is not taken."""
    if question.passed_over:
        message = f"the heterogeneous kernel is not taken: {'; '.join(question.passed_over)}"
        return (Reason("aiter-heterogeneous", message, hint="the server goes on as without it"),)
    decoder = [v.fused for d, v in zip(layers, verdicts, strict=True) if d.layer.kind is LayerKind.DECODER]
    if question.conditions and decoder and all(decoder):
        message = f"vLLM fuses {question.family.name} only under these conditions: {', '.join(question.conditions)}"
        return (Reason("aiter-conditions", message),)
    fused = (d.shared for d, v in zip(layers, verdicts, strict=True) if v.fused and d.shared)
    changed = [shared for shared in fused if shared.gate.kind is not StorageKind.MXFP4]
    if not question.mega_moe or not changed:
        return ()
    message = f"vLLM requantises the shared experts of {counted(len(changed), 'layer')} to MXFP4 while loading"
    return (Reason("aiter-requantised", message, hint="the result is not that of the checkpoint's own weights"),)
