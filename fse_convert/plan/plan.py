"""What the user asked for, what was decided, and what a conversion will write, as values.

`fse_convert.plan.planner` decides; nothing here opens a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fse_convert.model.description import LayerDescription
from fse_convert.plan.changes.change import FormatChange
from fse_convert.plan.source import Source
from fse_convert.plan.tensors import OutputShard
from fse_convert.servers.judge import AnyTarget
from fse_convert.servers.load_padding import needed_contract
from fse_convert.servers.native import LaunchWidths
from fse_convert.servers.targets import CONTRACT, Contract, Target
from fse_convert.servers.verdict import Verdict
from fse_convert.sidecar.manifest import ConfigEdit
from fse_convert.sidecar.tensors import KernelTensorName


class Experts(str, Enum):
    """Which experts are padded in the standard layout: all of them, or none (the kernel layout is padded either way)."""

    ALL = "all"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    ``target``: the kernel contract or server to convert for; None where a change alone was asked for. ``tp``: the serving side's
    tensor-parallel size. ``allow_unfused``: whether unfused layers may pass. ``routed_fp8`` and ``shared_mxfp4``: changes of format
    that were asked for by name; ``heal``: every mend of config and headers. ``lossy``: whether a change may lose precision.
    ``drop_originals``: leave out what `restore` needs of tensors that do not follow from the output.
    """

    target: AnyTarget | None
    experts: Experts = Experts.ALL
    tp: int = 1
    allow_unfused: bool = False
    routed_fp8: bool = False
    shared_mxfp4: bool = False
    heal: bool = False
    lossy: bool = False
    drop_originals: bool = False

    @property
    def server(self) -> AnyTarget | None:
        """The server that was named; None for a bare contract, and without a target."""
        return None if self.target is None or self.target.engine == CONTRACT else self.target

    @property
    def goal(self) -> str:
        """The contract, else the server, that the output is made for, by name; empty for neither."""
        return self.contract.name if self.contract else self.target.name if self.target else ""

    @property
    def contract(self) -> Contract | None:
        """The kernel contract that the output must meet; None for a server without it, and where formats change by name."""
        if not isinstance(self.target, Target) or self.routed_fp8 or self.shared_mxfp4 or self.heal:
            return None
        return needed_contract(self.target)


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What comes of a layer, by two questions that are never mixed.

    ``verdict``: whether it fits the kernel contract at the width of ``fse/``: decides what is written there and what is refused;
    without a contract, what the target makes of it. ``server``: what the target makes of it as the output's standard layout holds
    it: what `inspect` says of the output.
    """

    layer: LayerDescription
    verdict: Verdict
    server: Verdict


def grows_apart(old: LaunchWidths, new: LaunchWidths) -> bool:
    """Tell whether the shared MLP has a width of its own, not the same multiple of the routed width before and after."""
    ratio, rest = divmod(old.shared, old.routed)
    return rest > 0 or new.shared != ratio * new.routed


@dataclass(frozen=True, slots=True)
class Decision:
    """What is decided before any shard is looked at.

    ``changes``: of format; ``after``: the source as it is once they are made, in memory, which the verdicts are about.
    ``at_source``, ``at_main`` and ``at_kernel``: widths in the source, in the output's standard layout, and in its kernel layout.
    ``server``: what the target makes of the
    output's standard layout as a whole. ``config_edits``: of widths.
    """

    changes: tuple[FormatChange, ...]
    after: Source
    at_source: LaunchWidths
    at_main: LaunchWidths
    at_kernel: LaunchWidths
    verdicts: tuple[LayerVerdict, ...]
    server: Verdict
    config_edits: tuple[ConfigEdit, ...]

    @property
    def pads(self) -> bool:
        """Whether experts grow in the standard layout."""
        return self.at_main != self.at_source

    @property
    def n_shared(self) -> int:
        """How many routed experts wide the shared MLP is; as many as the config says where it has a width of its own."""
        ratio, rest = divmod(self.at_kernel.shared, self.at_kernel.routed)
        return self.after.description.n_shared if rest else ratio

    @property
    def source_width(self) -> int:
        """Width of one routed expert in the source."""
        return self.at_source.routed

    @property
    def main_width(self) -> int:
        """Width of one routed expert in the output's standard layout."""
        return self.at_main.routed

    @property
    def width(self) -> int:
        """Width of one expert in the output's kernel layout."""
        return self.at_kernel.routed

    @property
    def growth(self) -> str:
        """Say from what to what experts grow: routed ones, and the shared MLP where it grows by itself."""
        old, new = self.at_source, self.at_kernel
        own = f", shared {old.shared} -> {new.shared}" if grows_apart(old, new) else ""
        return f"{old.routed} -> {new.routed}{own}"

    @property
    def fused_layers(self) -> int:
        """How many layers fit the contract: those are written to ``fse/``; without a contract, how many the target fuses."""
        return sum(v.verdict.fused for v in self.verdicts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion will do.

    ``shards``: the standard layout; ``sidecar``: the kernel layout in ``fse/``; ``originals``: what ``restore`` needs, also there.
    """

    source: Source
    options: Options
    decision: Decision
    shards: tuple[OutputShard, ...]
    sidecar: tuple[OutputShard, ...]
    originals: tuple[OutputShard, ...] = ()

    @property
    def rewritten(self) -> bool:
        """Whether the standard layout changes at all."""
        return not all(s.carried for s in self.shards)

    @property
    def kernel_layers(self) -> int:
        """How many layers have the kernel layout."""
        return sum(len(s.kernel_tensors) for s in self.sidecar) // len(KernelTensorName)
