"""One layer in one server, as the rows of `fse_convert.servers.hazards` ask about it."""

from __future__ import annotations

from dataclasses import dataclass

from fse_convert.model.description import ExpertGroup, LayerDescription
from fse_convert.model.formats import StorageKind
from fse_convert.model.moe import LayerKind
from fse_convert.model.quantization import FP8_METHODS
from fse_convert.servers.aiter.quant_compatible import AiterQuestion
from fse_convert.servers.aiter.question import AiterTarget
from fse_convert.servers.slots import SlotTarget
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome, Verdict

MXFP4 = StorageKind.MXFP4


def is_stored(group: ExpertGroup, kind: StorageKind, *scales: str) -> bool:
    """Tell whether some matrix of a group is stored in a format, and with scales of one of these dtypes."""
    return any(f.kind is kind and (not scales or f.scale_dtype in scales) for f in group.formats.values())


@dataclass(frozen=True, slots=True)
class Situation:
    """One layer in one server.

    ``verdict``: what the server's own check says of it; ``aiter``: what that check looks at in an AITER target, None in others.
    """

    subject: Subject
    target: Target | AiterTarget | SlotTarget
    layer: LayerDescription
    routed: ExpertGroup
    shared: ExpertGroup
    verdict: Verdict
    aiter: AiterQuestion | None

    @property
    def sglang_slots(self) -> bool:
        """True for SGLang as it is asked for slots."""
        return isinstance(self.target, SlotTarget) and self.target.engine == "SGLang"

    @property
    def sglang_gate_known(self) -> bool:
        """True for SGLang's slots, for a model whose gate is known."""
        return self.sglang_slots and self.verdict.outcome is not Outcome.UNKNOWN

    @property
    def engine_read(self) -> bool:
        """True for vLLM and SGLang, whose config classes were read."""
        return self.target.engine.startswith(("vLLM", "SGLang"))

    @property
    def by_quark(self) -> bool:
        """True for a checkpoint by AMD Quark."""
        return self.subject.quantization.method == "quark"

    @property
    def deepseek_fp8(self) -> bool:
        """True for a checkpoint in DeepSeek's own FP8."""
        return self.subject.quantization.method in FP8_METHODS

    @property
    def is_drafter(self) -> bool:
        """True for a layer of the drafter."""
        return self.layer.layer.kind is LayerKind.MTP

    @property
    def vllm_slot(self) -> bool:
        """True if vLLM's check says that it loads this shared expert, unconverted, as an extra routed expert."""
        ways = self.aiter is not None and not self.aiter.mega_moe and (self.is_drafter or not self.aiter.heterogeneous)
        return ways and self.verdict.fused

    @property
    def vllm_v4(self) -> bool:
        """True where an AITER target runs DeepSeek-V4's class."""
        return self.aiter is not None and self.aiter.family.v4

    @property
    def vllm_v41(self) -> bool:
        """True where an AITER target runs DeepSeek-V4.1's class."""
        return self.aiter is not None and self.aiter.family.name == "DeepSeek-V4.1"

    @property
    def stored_alike(self) -> bool:
        """True where a slot could hold the shared expert; MXFP4 is loaded under either label of its bytes."""
        return self.routed.stored_like(self.shared) or (is_stored(self.routed, MXFP4) and is_stored(self.shared, MXFP4))
