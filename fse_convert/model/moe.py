"""The parts of a MoE layer as values: projections, experts, layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from fse_convert.checkpoint.header import TensorInfo


class Role(str, Enum):
    """The three projections of an expert; gate and up map hidden to width, down maps back."""

    GATE = "gate"
    UP = "up"
    DOWN = "down"

    __hash__ = str.__hash__  # that of Enum is written in Python, and every expert has a dict by role


class LayerKind(str, Enum):
    """A decoder layer, or a layer of the multi-token-prediction drafter."""

    DECODER = "decoder"
    MTP = "mtp"


class Projection(NamedTuple):
    """One linear map as stored: its tensors by suffix (``weight``, ``scale``, ...).

    ``of``: how many projections share the rows of these tensors evenly; two where gate and up are one matrix.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    of: int = 1


class Expert(NamedTuple):
    """One expert MLP. Several shared experts are stored as one MLP of their summed width."""

    name: str
    projections: Mapping[Role, Projection]


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One MoE block as the tensor names show it.

    ``name`` is the block's prefix (``layers.3.ffn``), ``index`` its number within its kind. ``routed`` are in expert order;
    ``gate_tensor`` is the shared expert's own gate (Qwen) if there is one; ``unknown`` are expert tensors that no rule
    explains, ``stacked`` those that hold all routed experts of the layer (Llama 4), and ``fused`` the matrices of a shared MLP
    whose gate and up are one (Granite). ``twins``: other names of blocks or layers under which the same layer is there too.
    ``doubled``: projections of the shared expert that have another name beside the one that ``shared`` has.
    """

    name: str
    kind: LayerKind
    index: int
    routed: tuple[Expert, ...]
    shared: Expert | None
    gate_tensor: str | None
    unknown: tuple[str, ...]
    stacked: tuple[TensorInfo, ...] = ()
    fused: tuple[TensorInfo, ...] = ()
    twins: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many routed experts there are."""
        return len(self.routed) or max((t.shape[0] for t in self.stacked if len(t.shape) > 2), default=0)
