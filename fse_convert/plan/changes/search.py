"""Which changes of format help a source: as few as possible, and those that lose nothing first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from fse_convert.errors import FseConvertError, InvalidCheckpoint, NotConvertible, Problem
from fse_convert.model.moe import LayerKind
from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.change import FormatChange
from fse_convert.plan.changes.heal import heals
from fse_convert.plan.changes.routed_fp8 import routed_fp8
from fse_convert.plan.changes.shared_mxfp4 import shared_mxfp4
from fse_convert.plan.plan import Decision, Options
from fse_convert.plan.source import Source
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome

Changes = tuple[FormatChange, ...]
Decide = Callable[[Source, Changes, Options], Decision]
"""Decides about a source as it is after some changes; raises as `fse_convert.plan.decide.decide` does."""
RECODINGS = {"routed_fp8": routed_fp8, "shared_mxfp4": shared_mxfp4}
"""Changes that a user can ask for, by the field of `Options`; the lossless one first."""
FITS = 2
"""The worst value of `misfit` with which a server can be used."""


class Candidates:
    """The lists of changes that may help a source; each is made once, whatever the number of targets that are tried."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.made: dict[tuple[str, ...], Source] = {}

    def after(self, changes: Changes) -> Source:
        """Return the source after some changes."""
        names = tuple(change.name for change in changes)
        if names not in self.made:
            self.made[names] = with_changes(self.source, changes)
        return self.made[names]

    @cached_property
    def heals(self) -> Changes:
        """Every defect of config or headers that the headers prove, with its mend."""
        return heals(self.source.subject)

    @cached_property
    def recodings(self) -> dict[str, FormatChange | Problem]:
        """Every recoding, or why it does not apply, on the healed config."""
        healed = with_changes(self.source, tuple(replace(heal, tensors={}) for heal in self.heals))
        return {name: recode(healed.subject) for name, recode in RECODINGS.items()}

    def asked(self, options: Options) -> Changes:
        """Return the changes that were asked for by name. Raises NotConvertible for one that does not apply, or may not be made."""
        found = []
        for name in (name for name in RECODINGS if getattr(options, name)):
            change = self.recodings[name]
            if isinstance(change, Problem):
                raise NotConvertible(change)
            found.append(change)
        if any(not change.lossless for change in found) and not options.lossy:
            raise NotConvertible(Problem("lossy", "this change loses precision", "--shared mxfp4", "--lossy permits it"))
        return tuple(found)

    def lists(self, options: Options) -> Iterator[Changes]:
        """Yield the lists to try, in order: what was asked for, then with more; each with and without all heals."""
        asked = self.asked(options)
        bases = [asked]
        if not isinstance(options.target, Target) and options.target and not asked:
            others = (change for change in self.recodings.values() if isinstance(change, FormatChange))
            bases += [(change,) for change in others if change.lossless or options.lossy]
        for base in bases:
            yield base
            if self.heals and options.target:
                yield (*self.heals, *base)


def choose(candidates: Candidates, options: Options, decide: Decide) -> Decision:
    """Return the decision for the first list of changes after which the target fuses every decoder layer.

    The drafter comes second: some servers cannot fuse it in any format. Without such a list, the decision or the error for what
    was asked for.
    """
    first: Decision | FseConvertError | None = None
    fitting: list[Decision] = []
    for changes in candidates.lists(options):
        decision = _tried(candidates, changes, options, decide)
        first = first or decision
        if isinstance(decision, FseConvertError) or (options.target and misfit(decision) > FITS):
            continue
        fitting.append(decision)
        if not options.target or misfit(decision) < FITS:
            break
    if fitting:
        return _without_needless(candidates, min(fitting, key=misfit), options, decide)
    if isinstance(first, Decision):
        return first
    raise first or NotConvertible(Problem("no-change-helps", "there is nothing to do"))


def misfit(decision: Decision) -> int:
    """Return how far a server is from fusing everything.

    0: it fuses all. 1: all but the drafter, which runs unfused. 2: all but the drafter, which fails. 3: not the decoder layers.
    """
    if decision.server.fused:
        return 0
    of = {kind: [v.server for v in decision.verdicts if v.layer.layer.kind is kind] for kind in LayerKind}
    whole = decision.server.outcome not in (Outcome.ERROR, Outcome.REFUSED)
    if not whole or not of[LayerKind.DECODER] or not all(v.fused for v in of[LayerKind.DECODER]):
        return 3
    return 1 if all(v.outcome in (Outcome.FUSED, Outcome.UNFUSED) for v in of[LayerKind.MTP]) else 2


def _tried(candidates: Candidates, changes: Changes, options: Options, decide: Decide) -> Decision | FseConvertError:
    try:
        return decide(candidates.after(changes), changes, options)
    except (InvalidCheckpoint, NotConvertible) as e:
        return e


def _without_needless(candidates: Candidates, decision: Decision, options: Options, decide: Decide) -> Decision:
    """Leave out every heal without which the target fuses as much."""
    for heal in candidates.heals:
        fewer = tuple(change for change in decision.changes if change.name != heal.name)
        if len(fewer) < len(decision.changes):
            tried = _tried(candidates, fewer, options, decide)
            if isinstance(tried, Decision) and misfit(tried) <= misfit(decision):
                decision = tried
    return decision
