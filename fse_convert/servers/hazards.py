"""What a server does to a checkpoint after it has decided how to run it: loads that fail, and weights that are read wrongly.

Its own check reads configs, so it can say yes to tensors that its loader then cannot place, or places as what they are not. Each
row of `HAZARDS` is one such case, decidable from headers and configs, with the release and file that it was read from. A layer
that a row applies to is `Outcome.UNSAFE`, whatever the check says; where the server does not start at all, the row is one more
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from fse_convert.checkpoint.header import E8M0_DTYPES
from fse_convert.model.config_against_tensors import expected_layers
from fse_convert.model.description import LayerDescription
from fse_convert.model.families.family import DENSE_PREFIX
from fse_convert.model.formats import StorageKind
from fse_convert.model.hash_layers import V4, built_hash_layers
from fse_convert.model.moe import LayerKind
from fse_convert.model.quantization import SCHEME
from fse_convert.servers.aiter.patterns import quark_layer_config
from fse_convert.servers.aiter.quant_compatible import EXPERT_DTYPES, AiterQuestion
from fse_convert.servers.aiter.question import SWITCH, AiterTarget, drafter
from fse_convert.servers.aiter.vllm_config import VllmQuantKind
from fse_convert.servers.config_keys import FIRST_WITH_EXPERTS
from fse_convert.servers.drafters import DRAFTERS, Drafter
from fse_convert.servers.left_out import LeftOut, sglang_left_out, vllm_left_out
from fse_convert.servers.release_names import is_since
from fse_convert.servers.sglang_quark import SglangQuark, is_fp4
from fse_convert.servers.situation import Situation, is_stored
from fse_convert.servers.slots import SlotTarget
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome, Reason, Verdict

FP8, MXFP4, PLAIN = StorageKind.FP8_BLOCK, StorageKind.MXFP4, StorageKind.PLAIN
OFF = f"serve with {SWITCH}=0"
AS_F32 = "store the scales of routed and shared experts as F32, which holds every power of two as it is"


@dataclass(frozen=True, slots=True)
class Hazard:
    """One way to fail. The server's name stands before the ``message``.

    ``since``: the first release that it applies to; without it all that are known, and all that come.
    """

    code: str
    message: str
    hint: str
    source: str
    applies: Callable[[Situation], bool]
    since: str = ""

    def hits(self, s: Situation) -> bool:
        """Tell whether it happens to a layer in a server."""
        return self.applies(s) and (not self.since or is_since(s.target.release, self.since))


def with_hazards(
    subject: Subject,
    target: Target | AiterTarget | SlotTarget,
    layer: LayerDescription,
    own: Verdict,
    question: AiterQuestion | None = None,
) -> Verdict:
    """Return the verdict of the server's check, or that following it is unsafe; of experts that are understood."""
    pathless = own.outcome is Outcome.REFUSED and any(r.code == "model-unsupported" for r in own.reasons)
    if layer.routed is None or layer.shared is None or pathless:
        return own
    situation = Situation(subject, target, layer, layer.routed, layer.shared, own, question)
    rows = [h for h in HAZARDS if h.hits(situation)] or [h for h in LAST if h.hits(situation)]
    if not rows:
        return own
    reasons = (Reason(h.code, f"{target.engine} {target.release} {h.message}", hint=h.hint) for h in rows)
    if own.outcome in (Outcome.REFUSED, Outcome.ERROR):
        return Verdict(own.outcome, (*own.reasons, *reasons))
    return Verdict(Outcome.UNSAFE, (*(own.reasons if own.outcome is not Outcome.UNKNOWN else ()), *reasons))


def _expert_dtype_unread(s: Situation) -> bool:
    stored = s.routed.gate.kind.facts.expert_dtype
    if s.aiter is None or not (s.vllm_v4 or s.vllm_v41) or s.aiter.quant.class_name != "DeepseekV4FP8Config":
        return False
    read = s.aiter.read("expert_dtype", "fp4")
    return not s.aiter.quant.from_quark and stored is not None and read in EXPERT_DTYPES and read != stored


def _e8m0_experts(s: Situation) -> bool:
    if not (s.target.engine.startswith("vLLM") and s.deepseek_fp8 and is_stored(s.routed, FP8, *E8M0_DTYPES)):
        return False
    return (s.vllm_v4 or s.vllm_v41) if s.aiter else s.subject.description.model_type in V4_TYPES


def _overlooked(s: Situation) -> bool:
    quant = s.aiter.quant if s.aiter else None
    by_fp8 = quant is not None and quant.kind is VllmQuantKind.FP8 and not quant.from_quark
    return by_fp8 and s.vllm_slot and s.vllm_v4 and is_stored(s.routed, MXFP4) and s.shared.gate.scale == "scale"


def _vllm_misreads(s: Situation) -> bool:
    if s.aiter is None or s.aiter.quant.kind is not VllmQuantKind.QUARK or s.vllm_v41:
        return False
    k = s.layer.layer.index if s.is_drafter else None
    return bool(misread(s.aiter, s.subject.fp8_modules(s.layer.layer.name), k))


def misread(question: AiterQuestion, modules: tuple[str, ...], k: int | None = None) -> tuple[str, ...]:
    """Return those FP8 modules of a Quark checkpoint that vLLM builds as FP4. ``k``: the drafter layer that they are of."""
    layers, here, there = question.decoder_layers, "", ""
    if k is not None and question.family.v4:
        if layers is None:
            return ()
        question, here, there = drafter(question, k, layers), f"mtp.{k}.", f"model.layers.{layers + k}."
    general = question.quant.quark.get("global_quant_config")
    names = {module: question.renames.apply(module.replace(here, there, 1) if here else module) for module in modules}
    return tuple(module for module, name in names.items() if is_fp4(quark_layer_config(name, question.quark_specs) or general))


def _globbed(s: Situation) -> bool:
    exclude = s.subject.quantization.raw.get("exclude")
    if not (s.vllm_slot and s.by_quark and is_stored(s.shared, PLAIN) and isinstance(exclude, list)):
        return False
    globs = [entry for entry in exclude if isinstance(entry, str) and "*" in entry]
    return not is_stored(s.routed, PLAIN) and any(fnmatchcase(name, entry) for name in s.shared.modules for entry in globs)


def _not_mxfp4(s: Situation) -> bool:
    """MegaMoE takes routed experts in MXFP4; the heterogeneous kernel also wants FP8 shared ones with E8M0 scales."""
    if s.aiter is None or s.vllm_slot or not s.verdict.fused:
        return False
    fits = not s.aiter.heterogeneous or (is_stored(s.shared, FP8, "F8_E8M0") and s.shared.gate.block == (128, 128))
    return not (is_stored(s.routed, MXFP4) and fits)


def _sglang_misreads(s: Situation) -> bool:
    if not (s.sglang_gate_known and s.by_quark) or (s.is_drafter and s.layer.layer.index):
        return False
    read = SglangQuark.of(s.subject.quantization, s.subject.config, s.target.release, draft=s.is_drafter)
    return bool(read.misread(s.subject.fp8_modules(s.layer.layer.name)))


def _unchecked_glm(s: Situation) -> bool:
    glm = s.sglang_slots and s.by_quark and s.subject.description.model_type == "glm4_moe"
    return glm and is_stored(s.routed, MXFP4) and is_stored(s.shared, PLAIN)


def _drafter_short(row: Drafter, s: Situation) -> bool:
    fused = s.is_drafter and s.verdict.fused
    return fused and row.is_short(s.target.engine, s.subject.description, s.subject.config)


def _others_have_experts(s: Situation) -> bool:
    """Compare the decoder layers that have experts with those in which vLLM builds some, which reads no ``mlp_layer_types``."""
    about, config, key = s.subject.description, s.subject.config, DENSE_PREFIX.first
    known = s.target.engine.startswith("vLLM") and about.model_type in FIRST_WITH_EXPERTS and not about.gaps
    if not known or about.family is None:
        return False
    if about.family.number(config, key) is None:
        config = {**config, str(key): FIRST_WITH_EXPERTS[about.model_type]}
    decoder = [d.layer for d in about.layers if d.layer.kind is LayerKind.DECODER]
    built = expected_layers(replace(about.family, sparse=replace(DENSE_PREFIX, words=())), config, decoder)
    return built is not None and built != {layer.index for layer in decoder}


def _others_route_by_tables(s: Situation) -> bool:
    about = s.subject.description
    if not s.target.engine.startswith("vLLM") or about.model_type != V4 or about.family is None:
        return False
    tables, whole = s.subject.hash_layers
    built = built_hash_layers(about.family, s.subject.config)
    return not tables <= built or (whole and tables != built)


def _unstated(s: Situation) -> bool:
    plain = all(is_stored(group, PLAIN) for group in s.layer.groups)
    return s.verdict.fused and s.subject.quantization.method is None and not plain


def _left_out(s: Situation) -> LeftOut | None:
    if not (s.verdict.fused and s.deepseek_fp8 and s.engine_read):
        return None
    if s.target.engine == "SGLang":
        return sglang_left_out(s.subject.quantization.raw, s.layer.layer)
    return vllm_left_out(s.subject, s.layer.layer, s.target.release, s.aiter)


def _excluded(s: Situation) -> bool:
    """Tell whether experts are built unquantised that are not; a shared one in a slot is built as the routed ones are."""
    routed, shared = _left_out(s) or (False, False)
    apart = shared and not (s.vllm_slot or isinstance(s.target, SlotTarget))
    return (routed and not is_stored(s.routed, PLAIN)) or (apart and not is_stored(s.shared, PLAIN))


def _scales_expected(s: Situation) -> bool:
    stale = any(c.code == "quantization-stale" for c in s.subject.description.conflicts)
    plain = [is_stored(group, PLAIN) for group in (s.routed, s.shared)]
    built = any(p and not left for p, left in zip(plain, _left_out(s) or (True, True), strict=True))
    return (stale or built) and s.verdict.fused and (s.aiter is None or s.stored_alike) and any(plain)


V4_TYPES = ("deepseek_v4", "deepseek_v41")
FP8_BLOCK_HAZARD = Hazard(
    "aiter-fp8-block",
    "raises a ValueError: the FP8 MoE backend AITER does not take DeepSeek-V4.1's FP8 experts",
    f"serve on gfx942 with VLLM_ROCM_USE_AITER_MOE=0 and {SWITCH}=0",
    "0.31 to 0.33, run: FP8 MoE backend AITER does not support the deployment configuration",
    lambda s: s.vllm_v41 and is_stored(s.routed, FP8),
    since="0.31",
)

HAZARDS: tuple[Hazard, ...] = (
    Hazard(
        "quantization-unstated",
        "builds unquantised experts where the config names no quantisation method: the load fails, or codes are taken for values",
        "write the quantization_config that belongs to these weights",
        "vLLM 0.33 model_executor/layers/fused_moe/routed_experts.py, SGLang 0.5.23 layers/moe/fused_moe_triton/layer.py:"
        " without a quantisation method the parameters have the model's dtype and no scales",
        _unstated,
    ),
    Hazard(
        "quantization-excluded",
        "matches the config's list of excluded modules with this layer's, builds them unquantised, and they are stored quantised",
        "take these modules out of the list",
        "vLLM 0.33 layers/quantization/utils/quant_utils.py:619-693, SGLang 0.5.23 layers/quantization/utils.py:70-125",
        _excluded,
    ),
    Hazard(
        "scales-expected",
        "builds quantised experts, as the config says, and finds no scales for these: the load fails, or values are wrong",
        "list these experts among the modules that the quantisation leaves out",
        "vLLM 0.33 and SGLang 0.5.23 layers/quantization/fp8.py: parameters of scales are made by the config",
        _scales_expected,
    ),
    Hazard(
        "activation-scheme-missing",
        "raises a ValueError for an FP8 checkpoint whose quantization_config has no activation_scheme",
        'write "activation_scheme": "dynamic" into it',
        "vLLM 0.33 layers/quantization/fp8.py:161, SGLang 0.5.23 layers/quantization/fp8.py:350 (get_from_keys)",
        lambda s: s.verdict.fused and s.deepseek_fp8 and SCHEME not in s.subject.quantization.raw and s.engine_read,
    ),
    Hazard(
        "expert-dtype-unread",
        "builds routed experts by the expert_dtype that it reads, which is not how they are stored: the load fails",
        "DeepSeek-V4: write expert_dtype at the top level of config.json; V4.1: only into quantization_config",
        "0.33 models/deepseek_v4/quant_config.py:85-105 (absent: fp4); 0.29 to 0.32 alike",
        _expert_dtype_unread,
    ),
    Hazard(
        "fp8-e8m0-scales",
        "copies the E8M0 scales of FP8 experts as plain numbers: every value is wrong, and nothing is said",
        AS_F32,
        "vllm#51946; 0.29 models/deepseek_v4/nvidia/model.py:1513 and amd/model.py:851, 0.33 :1119 and :1403; deepseek_v41 alike",
        _e8m0_experts,
    ),
    Hazard(
        "shared-scale-bytes",
        "copies the shared expert's scales, whose dtype is U8, as plain numbers into E8M0 ones: its values are wrong",
        "store them as F8_E8M0: the bytes stay the same",
        "0.33 model_executor/layers/quantization/fp8.py:331-340 (float8_e8m0fnu), model_executor/parameter.py (copy_)",
        lambda s: s.target.engine == "vLLM" and s.verdict.fused and s.deepseek_fp8 and is_stored(s.shared, FP8, "U8"),
    ),
    Hazard(
        "fp8-slot-e8m0",
        "copies the shared expert's E8M0 scales as plain numbers into a slot whose scales are F32: its values are wrong",
        AS_F32,
        "0.30 models/deepseek_v4/amd/model.py:1240, 0.33 :1403",
        lambda s: s.vllm_slot and s.vllm_v4 and is_stored(s.routed, FP8, "F32") and is_stored(s.shared, FP8, *E8M0_DTYPES),
    ),
    Hazard(
        "aiter-fp4-overlooked",
        "judges DeepSeek-V4 by its FP8 rule, which does not see that routed experts are MXFP4: loading raises a KeyError",
        f"{OFF}, or with vLLM 0.33",
        "0.30 quantization/utils/config_utils.py:80, 0.31:86, 0.32:172: the class is V4.1's (quantization/__init__.py:119)",
        _overlooked,
    ),
    Hazard(
        "aiter-drafter-slots",
        "loads no shared expert into a slot of the drafter: serving with the drafter raises a KeyError",
        f"{OFF}, or without the drafter",
        "0.29 models/deepseek_v4/amd/mtp.py:460, 0.30:463, 0.31:494, 0.32:499, 0.33 alike: no redirect of shared experts",
        lambda s: s.is_drafter and s.vllm_slot and s.vllm_v4,
    ),
    *(Hazard("drafter-short", row.message, row.hint, row.source, partial(_drafter_short, row)) for row in DRAFTERS),
    Hazard(
        "mtp-unskipped",
        "passes over as many layers behind the decoder's as config.json promises MTP layers, and there are others: the load fails",
        "state the number of MTP layers that the tensors show, or take the others out",
        "0.29 to 0.33 model_executor/models/deepseek_v2.py (KeyError), glm4_moe.py (ValueError), 0.33 utils.py:575-597",
        lambda s: s.target.engine.startswith("vLLM") and any(c.code == "mtp-unskipped" for c in s.subject.description.conflicts),
    ),
    Hazard(
        "dense-layers-differ",
        "builds experts by first_k_dense_replace, not by mlp_layer_types, and in other layers than have some: the load fails",
        "set first_k_dense_replace to the number of dense layers before the first one with experts",
        "0.33 models/deepseek_v32/amd/model.py:77, model_executor/models/deepseek_v2.py:1295, glm4_moe.py:355, lite:170",
        _others_have_experts,
    ),
    Hazard(
        "hash-layers-differ",
        "routes other layers by a table than have one: it counts them in mlp_layer_types, else by num_hash_layers, else takes 3",
        "state num_hash_layers as the number of layers with a tid2eid, and mlp_layer_types, where it is there, alike",
        "0.33 models/deepseek_v4/nvidia/model.py:284, 612, amd/model.py:626-629",
        _others_route_by_tables,
        since="0.33",
    ),
    FP8_BLOCK_HAZARD,
    Hazard(
        "aiter-slots-unloaded",
        "says yes for DeepSeek-V4.1, whose loader puts no shared expert into a slot: loading raises an error",
        OFF,
        "0.33 models/deepseek_v41/amd/model.py:1015-1134 (KeyError), 0.31 and 0.32 alike, 0.30 (AssertionError)",
        lambda s: s.vllm_slot and s.vllm_v41 and not FP8_BLOCK_HAZARD.hits(s),
    ),
    Hazard(
        "quark-modules-misread",
        "finds no entry of layer_quant_config for FP8 modules of this layer and builds them as MXFP4: the load fails",
        "name each module exactly, drafter layers both as mtp.N and as the layer after the last one; re: entries are not read",
        "0.31 quantization/quark/quark.py, 0.33 :724-762 (get_layer_quant_config_from_name)",
        _vllm_misreads,
    ),
    Hazard(
        "quark-exclude-glob",
        "reads no globs in Quark's exclude, so it takes the unquantised shared expert for MXFP4: the load fails",
        "name the excluded modules exactly",
        "0.29 to 0.33 quantization/quark/utils.py:33-63 (should_ignore_layer)",
        _globbed,
    ),
    Hazard(
        "quark-e8m0-typed",
        "loads MXFP4 scales of Quark checkpoints only as U8 and skips these, typed F8_E8M0, without a word: values are wrong",
        "relabel the scales as U8; their bytes stay",
        "0.5.21 to 0.5.23 layers/quantization/quark, run",
        lambda s: s.sglang_gate_known and s.by_quark and any(is_stored(group, MXFP4, "F8_E8M0") for group in s.layer.groups),
    ),
    Hazard(
        "quark-modules-misread",
        "finds no entry of layer_quant_config for FP8 modules of this layer and builds them as MXFP4: the load fails",
        "name each module exactly, and serve with SGLang 0.5.22 or later",
        "0.5.20 and 0.5.21 models/deepseek_v4.py: config names are not renamed; 0.5.22 quark.py:387-396",
        _sglang_misreads,
    ),
    Hazard(
        "slot-scale-lost",
        "takes the shared expert's MXFP4 scale for that of an FP8 weight and drops it: its values are wrong, and nothing is said",
        "serve without --enforce-shared-experts-fusion",
        "0.5.20 to 0.5.23 layers/moe/fused_moe_triton/layer.py:1069-1092",
        lambda s: s.sglang_gate_known and s.deepseek_fp8 and s.verdict.fused and is_stored(s.shared, MXFP4, "F8_E8M0"),
    ),
    Hazard(
        "slot-storage-differs",
        "takes the shared expert for MXFP4 by the config and puts it, stored otherwise, into an MXFP4 slot",
        "serve without --enforce-shared-experts-fusion",
        "0.5.23 layers/quantization/quark/quark.py:1260 (can_fuse_shared_expert reads the config alone)",
        lambda s: s.sglang_gate_known and s.by_quark and s.verdict.fused and not s.stored_alike,
    ),
    Hazard(
        "slot-unchecked",
        "does not compare formats for GLM-4-MoE and puts the unquantised shared expert into an MXFP4 slot on gfx942 and later",
        "serve with --disable-shared-experts-fusion",
        "0.5.20 models/glm4_moe.py:1172, 0.5.23:1012-1035",
        _unchecked_glm,
    ),
)
"""Every row that applies to a layer is told."""
LAST: tuple[Hazard, ...] = (
    Hazard(
        "aiter-storage-differs",
        "is told by the config that routed and shared experts are alike, but they are stored otherwise: the load fails or is wrong",
        OFF,
        "the check reads configs only (ROCm/ATOM#958)",
        lambda s: s.vllm_slot and not s.stored_alike,
    ),
    Hazard(
        "aiter-storage-differs",
        "is told by the config what this path takes, but the experts are stored otherwise: the load fails or is wrong",
        "serve without this path",
        "the check reads configs only",
        _not_mxfp4,
    ),
)
"""Rows for what no other row explains."""
