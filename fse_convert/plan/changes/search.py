"""Which changes of format help a source: as few as possible, and those that lose nothing first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property

from fse_convert.errors import FseConvertError, InvalidCheckpoint, NotConvertible, Problem
from fse_convert.model.moe import LayerKind
from fse_convert.plan.changes.apply import with_changes
from fse_convert.plan.changes.change import FormatChange, Result
from fse_convert.plan.changes.heal import heals, with_config
from fse_convert.plan.changes.routed_fp8 import routed_fp8
from fse_convert.plan.changes.shared_mxfp4 import shared_mxfp4
from fse_convert.plan.plan import Decision, Options
from fse_convert.plan.source import Source
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import Target
from fse_convert.servers.verdict import Outcome

Changes = tuple[FormatChange, ...]
Decide = Callable[[Source, Changes, Options], Decision]
"""Decides about a source as it is after some changes; raises as `fse_convert.plan.decide.decide` does."""
RECODINGS: Mapping[str, Callable[[Subject], Result]] = {"routed_fp8": routed_fp8, "shared_mxfp4": shared_mxfp4}
"""Changes that a user can ask for, by the field of `Options`; the lossless one first."""
LOSSY = frozenset({"shared_mxfp4"})
"""Those of them that lose precision."""
HEAL = "heal-"
"""How the names of mends begin."""
UNSTACK = "have the model written again with every expert by itself; --tp N pads stacked experts as they are"


class Unfused(IntEnum):
    """What a server leaves unfused, from nothing on."""

    NOTHING = 0
    DRAFTER_RUNS = 1
    DRAFTER_FAILS = 2
    DECODER = 3

    @property
    def usable(self) -> bool:
        """True where all decoder layers fuse."""
        return self is not Unfused.DECODER


class Candidates:
    """The lists of changes that may help a source; each is made once, whatever the number of targets that are tried."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.made: dict[tuple[str, ...], Source] = {}
        self.recoded: dict[tuple[str, str], Result] = {}

    def after(self, changes: Changes) -> Source:
        """Return the source after some changes."""
        names = tuple(change.name for change in changes)
        if names not in self.made:
            self.made[names] = with_changes(self.source, changes)
        return self.made[names]

    @cached_property
    def stacked(self) -> Problem | None:
        """Why no change of format can be made: a tensor holds all routed experts of a layer; None where none does."""
        name = next((info.name for d in self.source.description.layers for info in d.layer.stacked), "")
        message = "this tensor holds all routed experts of a layer; a format changes only where every expert has tensors of its own"
        return Problem("changes-stacked", message, name, UNSTACK) if name else None

    @cached_property
    def heals(self) -> Changes:
        """Every defect of config or headers that the headers prove, with its mend."""
        return () if self.stacked else heals(self.source.subject)

    def recoding(self, name: str, healed: Changes) -> Result:
        """Return a recoding by its field of `Options`, or why it does not apply, where the config has been healed so."""
        key = name, ",".join(heal.name for heal in healed)
        if key not in self.recoded:
            subject = self.source.subject
            for heal in healed:
                subject = with_config(subject, heal)
            self.recoded[key] = self.stacked or RECODINGS[name](subject)
        return self.recoded[key]

    def changes(self, names: Sequence[str], healed: Changes) -> Changes | None:
        """Return mends and the recodings of these names after them; None where one does not apply."""
        found = [self.recoding(name, healed) for name in names]
        made = tuple(change for change in found if isinstance(change, FormatChange))
        return (*healed, *made) if len(made) == len(found) else None

    def asked(self, options: Options) -> list[str]:
        """Return the recodings that were asked for. Raises NotConvertible for one that does not apply, or may not be made."""
        names = [name for name in RECODINGS if getattr(options, name)]
        if self.stacked and (names or options.heal):
            raise NotConvertible(self.stacked)
        if len(names) > 1:
            message = "routed experts in FP8 and shared experts in MXFP4 fuse nowhere"
            raise NotConvertible(Problem("changes-combined", message, hint="choose one of --routed and --shared"))
        for name in names:
            if isinstance(change := self._possible(name), Problem):
                raise NotConvertible(change)
            if name in LOSSY and not options.lossy:
                raise NotConvertible(Problem("lossy", "this change loses precision", "--shared mxfp4", "--lossy permits it"))
        if options.heal and not self.heals:
            raise NotConvertible(Problem("nothing-to-heal", "config and headers show no defect that is known", "--heal"))
        return names

    def to_try(self, options: Options) -> Iterator[tuple[list[str], Changes]]:
        """Yield recodings and the mends before them, in the order in which to try them: first without mends."""
        for names in self._recodings_to_try(options):
            if not options.heal:
                yield names, ()
            if self.heals and (options.target or options.heal):
                yield names, self.heals

    def _recodings_to_try(self, options: Options) -> list[list[str]]:
        """Return what was asked for; where nothing was, for a server that fuses by format: none, then each by itself."""
        asked = self.asked(options)
        if asked or not options.target or isinstance(options.target, Target):
            return [asked]
        permitted = [name for name in RECODINGS if options.lossy or name not in LOSSY]
        return [[], *([name] for name in permitted if isinstance(self._possible(name), FormatChange))]

    def recodings(self) -> Iterator[Result]:
        """Yield every recoding on the healed config, or why it does not apply."""
        return (self.recoding(name, self.heals) for name in RECODINGS)

    def _possible(self, name: str) -> Result:
        """Return a recoding, on the healed config if need be; why it does not apply to the config as it is if neither helps."""
        plain = self.recoding(name, ())
        if isinstance(plain, FormatChange) or isinstance(healed := self.recoding(name, self.heals), Problem):
            return plain
        return healed


def choose(candidates: Candidates, options: Options, decide: Decide) -> Decision | FseConvertError:
    """Return the decision for the first list of changes after which the target fuses every decoder layer.

    A change that loses precision is made only where no other helps; then the drafter counts, which some servers cannot fuse in any
    format. Without such a list, the decision or the error for what was asked for. Raises NotConvertible for what may not be made.
    """
    first: Decision | FseConvertError | None = None
    best: tuple[Decision, list[str]] | None = None
    for names, healed in candidates.to_try(options):
        decision = _tried(candidates, candidates.changes(names, healed), options, decide)
        first = first or decision
        if not isinstance(decision, Decision) or (options.target and not left_unfused(decision).usable):
            continue
        if best and not all(change.lossless for change in decision.changes):
            break
        if best is None or left_unfused(decision) < left_unfused(best[0]):
            best = decision, names
        if not options.target or left_unfused(decision) < Unfused.DRAFTER_FAILS:
            break
    if best is None:
        return first or NotConvertible(Problem("no-change-helps", "no list of changes can be made"))
    return best[0] if options.heal else _without_needless(candidates, *best, options, decide)


def left_unfused(decision: Decision) -> Unfused:
    """Return what the target would leave unfused of the output."""
    if decision.server.fused:
        return Unfused.NOTHING
    of = {kind: [v.server for v in decision.verdicts if v.layer.layer.kind is kind] for kind in LayerKind}
    whole = decision.server.outcome not in (Outcome.ERROR, Outcome.REFUSED)
    if not whole or not of[LayerKind.DECODER] or not all(v.fused for v in of[LayerKind.DECODER]):
        return Unfused.DECODER
    runs = all(v.outcome in (Outcome.FUSED, Outcome.UNFUSED) for v in of[LayerKind.MTP])
    return Unfused.DRAFTER_RUNS if runs else Unfused.DRAFTER_FAILS


def _tried(candidates: Candidates, changes: Changes | None, options: Options, decide: Decide) -> Decision | FseConvertError | None:
    if changes is None:
        return None
    try:
        return decide(candidates.after(changes), changes, options)
    except (InvalidCheckpoint, NotConvertible) as e:
        return e.with_traceback(None)  # whose frames would hold the source after the changes


def _without_needless(candidates: Candidates, decision: Decision, names: list[str], options: Options, decide: Decide) -> Decision:
    """Leave out every mend without which the target fuses as much."""
    left_out: list[str] = []
    for heal in [change for change in decision.changes if change.name.startswith(HEAL)]:
        fewer = heals(candidates.source.subject, but=(*left_out, heal.name))
        tried = _tried(candidates, candidates.changes(names, fewer), options, decide)
        if isinstance(tried, Decision) and left_unfused(tried) <= left_unfused(decision):
            decision = tried
            left_out.append(heal.name)
    return decision
