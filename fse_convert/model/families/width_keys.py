"""Which keys of config.json hold the width of an expert, family by family, and whose width each loader takes them for.

The loaders that they were read from are in the family's row, as its ``source``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Share(Enum):
    """Whose width a key states."""

    ROUTED = "a routed expert"
    SHARED = "the shared MLP"
    ONE_SHARED = "one shared expert"


@dataclass(frozen=True)
class Width:
    """A key from which some loader builds experts: padding edits every one that is there.

    ``assumed``: the width that loaders take where the key is missing; empty where they then read another key. ``optional``:
    some loaders never read it. ``dense``: dense MLPs of decoder layers are built from it too, unless ``dense_key`` is there.
    """

    key: str
    share: Share = Share.ROUTED
    assumed: str = ""
    optional: bool = False
    dense: bool = False
    dense_key: str | None = None

    def of(self, routed: int | None, shared: int | None, n_shared: int) -> int | None:
        """Return what the key must hold for experts of this width, ``n_shared`` of them shared; None where no integer says it."""
        if self.share is Share.ROUTED:
            return routed
        if self.share is Share.SHARED or shared is None:
            return shared
        return shared // n_shared if n_shared and shared % n_shared == 0 else None


DEFAULT = "a default of their own"
EACH_SHARED = "moe_shared_expert_intermediate_size"

MOE = (Width("moe_intermediate_size", assumed=DEFAULT),)
"""Of most families."""
INTERMEDIATE = (Width("intermediate_size", assumed=DEFAULT),)
DENSE_TOO = (Width("intermediate_size", assumed=DEFAULT, dense=True),)
EITHER_NAME = (*MOE, Width("intermediate_size"))
GEMMA_4 = (*MOE, Width("expert_intermediate_size"))
HUNYUAN_V3 = (*MOE, Width("expert_hidden_dim"))
LONGCAT = (Width("expert_ffn_hidden_size", assumed=DEFAULT), Width("moe_intermediate_size"))
COHERE_2 = (Width("intermediate_size", assumed=DEFAULT, dense=True, dense_key="prefix_dense_intermediate_size"),)
HUNYUAN = (*DENSE_TOO, Width("moe_intermediate_size"))
HUNYUAN_READINGS = (Width("intermediate_size", Share.SHARED),)
"""Of transformers, whatever num_shared_expert says."""

QWEN = (*MOE, Width("shared_expert_intermediate_size", Share.SHARED, assumed=DEFAULT))
GRANITE_SHARED = (*INTERMEDIATE, Width("shared_intermediate_size", Share.SHARED))
MINIMAX_M3 = (*INTERMEDIATE, Width("shared_intermediate_size", Share.SHARED, assumed="3072 (transformers 5.24)", optional=True))
MINIMAX_M3_READINGS = (Width("intermediate_size", Share.ONE_SHARED),)
"""Of vLLM and SGLang, where transformers reads shared_intermediate_size."""
DOTS_3_NOTE = (
    *MOE,
    Width("shared_experts_intermediate_size", Share.ONE_SHARED, assumed="1536 (transformers 5.24)", optional=True),
    Width(EACH_SHARED, Share.ONE_SHARED),
)
STEP_3 = (*MOE, Width("share_expert_dim", Share.SHARED, assumed="5120 (vLLM 0.33)"))
STEP_5 = (
    *MOE,
    Width("share_expert_dim", Share.SHARED, assumed="moe_intermediate_size x moe_top_k (vLLM 0.33)"),
    Width("share_expert_dims", Share.SHARED),
)
LING = (*MOE, Width(EACH_SHARED, Share.ONE_SHARED))
LING_3_READINGS = (Width(EACH_SHARED, Share.SHARED), Width("moe_intermediate_size", Share.ONE_SHARED))
"""Three loaders, three readings of one shared expert: they agree where there is one, as wide as a routed one."""
SARVAM_READINGS = (Width("moe_intermediate_size", Share.ONE_SHARED),)
PARAM_2 = (*MOE, Width(EACH_SHARED, Share.SHARED))
NEMOTRON_H = (*MOE, Width(EACH_SHARED, Share.ONE_SHARED, assumed=DEFAULT))
NEMOTRON_H_READINGS = (Width(EACH_SHARED, Share.SHARED),)
