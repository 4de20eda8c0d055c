"""Which changes of format would make which servers fuse a checkpoint: what is lost, what it costs on disk, and the command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fse_convert.errors import size
from fse_convert.plan.advice import NO_PATH, REQUANTISED, Decider, releases
from fse_convert.plan.changes.search import Unfused, left_unfused
from fse_convert.plan.commands import conversion_command
from fse_convert.plan.decide import decider
from fse_convert.plan.plan import Decision, Options
from fse_convert.plan.source import Source
from fse_convert.servers.judge import ALL_TARGETS, Answer, AnyTarget, answer
from fse_convert.servers.release_names import server_of
from fse_convert.servers.routed_fp8 import unserved
from fse_convert.servers.targets import CONTRACT
from fse_convert.servers.verdict import Outcome

DRAFTER = {
    Unfused.NOTHING: "",
    Unfused.DRAFTER_RUNS: "; the drafter's layers run unfused",
    Unfused.DRAFTER_FAILS: "; not with the drafter, which fails",
}
"""What comes of the drafter."""
BY_NAME = {target.name: target for target in ALL_TARGETS}
FALLS_BACK = "aiter-heterogeneous"
"""The note of a server that goes on without the kernel that the target is about."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A list of changes, and the servers that fuse the output.

    ``bytes``: by which the standard layout grows; ``originals``: kept in ``fse/`` for ``restore``. ``drafter``: what comes of it,
    as the end of a sentence. ``requantised``: whether these servers fuse the checkpoint as it is too, with rounded shared experts.
    ``lost``: servers that fuse it as it is and would not afterwards; ``unserved``: those that could not serve it any more.
    ``needs``: how the server must be started for right values, where its row says less.
    """

    targets: tuple[AnyTarget, ...]
    does: tuple[str, ...]
    lossless: bool
    bytes: int
    originals: int
    drafter: str
    command: str
    requantised: bool = False
    lost: tuple[AnyTarget, ...] = ()
    unserved: tuple[str, ...] = ()
    needs: str = ""

    @property
    def costs(self) -> str:
        """What the change takes away, as sentences; empty for nothing."""
        said = [f"{releases(self.lost, ALL_TARGETS)} would no longer fuse it."] if self.lost else []
        said += [f"{engine} could no longer serve it." for engine in self.unserved]
        return " ".join((*said, *[f"Right only with {self.needs}."] * bool(self.needs)))


@dataclass(frozen=True, slots=True)
class Offers:
    """What changes of format can do.

    ``helpless``: servers that no known change makes fuse the checkpoint; ``kernels``: those that run it without the kernel that the
    target is about, whatever the format, and ``why``. ``mends``: what `heal` alone would do, and the command.
    ``tp``: the tensor-parallel size that was asked for.
    """

    offers: tuple[Offer, ...] = ()
    helpless: tuple[AnyTarget, ...] = ()
    kernels: tuple[AnyTarget, ...] = ()
    why: str = ""
    mends: tuple[str, ...] = ()
    heal: str = ""
    tp: int = 1

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield a sentence and its command per offer, and a sentence about the servers that nothing helps."""
        for offer in self.offers:
            lost = "lossless" if offer.lossless else "lossy"
            grows = f"{'+' if offer.bytes >= 0 else '-'}{size(abs(offer.bytes))}"
            kept = f", originals in fse/ {size(offer.originals)}" if offer.originals else ""
            does, who = " and ".join(offer.does), releases(offer.targets, ALL_TARGETS)
            exactly = " with its own values" * offer.requantised
            said = f"{who} would fuse it{exactly} after a change that {does} ({lost}; {grows}{kept}){offer.drafter}."
            yield f"{said} {offer.costs}".rstrip(), offer.command
        if self.mends:
            mends = "; ".join(self.mends)
            yield f"config.json or labels lack or contradict what the tensors show, which can be mended: {mends}.", self.heal
        if self.helpless:
            at = f" at TP {self.tp}" if self.tp > 1 else ""
            yield f"No change of format is known to help {releases(self.helpless, ALL_TARGETS)}{at}.", ""
        if self.kernels:
            who = releases(self.kernels, ALL_TARGETS)
            yield f"No change of format is known to give this checkpoint the kernel of {who}: {self.why}.", ""


def make_offers(answers: Sequence[Answer], source: Source, tp: int = 1) -> Offers:
    """Try every server that does not fuse a checkpoint as it is, without loss and with it, for ``tp`` ranks.

    A source after a change takes as much memory as the source: what was made without loss is let go of before the rest is made.
    """
    unfused = {a.name: a for a in answers if not a.fused and a.engine != CONTRACT and _has_path(a)}
    heal = Options(None, heal=True)
    mends: tuple[str, ...] = ()
    offers: list[Offer] = []
    helped: dict[str, bool] = {}
    for asked in (Options(None, tp=tp), Options(None, tp=tp, lossy=True, shared_mxfp4=True)):
        decide = decider(source)
        if not asked.lossy:
            mends = _mends(decide(heal))
            offers += _own_values(answers, decide, source, tp)
        names = [name for name in unfused if helped.get(name, True)]
        made, found = _tried(names, answers, decide, source, asked)
        offers += made
        helped |= found
    helpless = [name for name in unfused if name not in helped]
    passed_over = {n: note.message for n in helpless for note in unfused[n].notes if note.code == FALLS_BACK}
    return Offers(
        offers=tuple(offers),
        helpless=tuple(BY_NAME[name] for name in helpless if name not in passed_over),
        kernels=tuple(BY_NAME[name] for name in passed_over),
        why=next(reversed(passed_over.values()), "").partition(": ")[2],
        mends=mends,
        heal=_command(source, heal),
        tp=tp,
    )


def _tried(
    names: Iterable[str], answers: Sequence[Answer], decide: Decider, source: Source, asked: Options
) -> tuple[list[Offer], dict[str, bool]]:
    """Try targets with the permissions of ``asked``; return the offers, and of targets that are helped whether a change does it."""
    found: dict[tuple[tuple[str, ...], int], tuple[Decision, list[AnyTarget]]] = {}
    helped: dict[str, bool] = {}
    for target in (BY_NAME[name] for name in names):
        decision = decide(replace(asked, target=target))
        if decision and left_unfused(decision).usable and not _falls_back(decision, target):
            helped[target.name] = bool(decision.changes)
            if decision.changes:
                key = tuple(change.name for change in decision.changes), left_unfused(decision)
                found.setdefault(key, (decision, []))[1].append(target)
    offers = [_offer(d, tuple(ts), source, replace(asked, target=_newest(ts)), answers) for d, ts in found.values()]
    return offers, helped


def _mends(healed: Decision | None) -> tuple[str, ...]:
    return tuple(change.does for change in healed.changes) if healed else ()


def _falls_back(decision: Decision, target: AnyTarget) -> bool:
    """Tell whether a server fuses the output as another row says, without the kernel that the target is about."""
    return any(note.code == FALLS_BACK for note in answer(decision.after.subject, target).notes)


def _own_values(answers: Sequence[Answer], decide: Decider, source: Source, tp: int) -> Iterator[Offer]:
    """Yield the lossless change after which servers that requantise shared experts while loading have no need to."""
    rounding = [BY_NAME[a.name] for a in answers if a.fused and REQUANTISED.intersection(n.code for n in a.notes)]
    decided = {t.name: decide(Options(t, tp=tp, routed_fp8=True)) for t in rounding}
    if targets := tuple(t for t in rounding if (d := decided[t.name]) and left_unfused(d) is Unfused.NOTHING):
        newest = _newest(targets)
        if decision := decided[newest.name]:
            options = Options(newest, tp=tp, routed_fp8=True)
            yield replace(_offer(decision, targets, source, options, answers), requantised=True)


def _newest(targets: Sequence[AnyTarget]) -> AnyTarget:
    return [t for t in targets if server_of(t) == server_of(targets[0])][-1]


def _has_path(answer: Answer) -> bool:
    """Tell whether a server has a path for the model at all, as far as is known, and the model something to fuse."""
    reasons = {reason.code for reason in answer.model.reasons}
    return answer.model.outcome is not Outcome.UNKNOWN and not NO_PATH & reasons and reasons != {"no-shared-expert"}


def _command(source: Source, options: Options) -> str:
    return conversion_command(source.subject, source.checkpoint.folder.label, options)


def _offer(
    decision: Decision, targets: tuple[AnyTarget, ...], source: Source, options: Options, answers: Sequence[Answer]
) -> Offer:
    fused = (BY_NAME[a.name] for a in answers if a.fused and a.engine != CONTRACT and BY_NAME[a.name] not in targets)
    kept_or_unknown = (Outcome.FUSED, Outcome.UNKNOWN)
    newest = _newest(targets)
    needs = answer(decision.after.subject, newest).started_with
    kept = frozenset[str]().union(*(change.originals for change in decision.changes))
    return Offer(
        targets=targets,
        does=tuple(change.does for change in decision.changes),
        lossless=all(change.lossless for change in decision.changes),
        bytes=decision.after.checkpoint.total_size - source.checkpoint.total_size,
        originals=sum(source.checkpoint.tensors[name].nbytes for name in kept),
        drafter=DRAFTER[left_unfused(decision)],
        command=_command(source, options),
        lost=tuple(t for t in fused if answer(decision.after.subject, t).model.outcome not in kept_or_unknown),
        unserved=unserved(decision.after.subject),
        needs=needs if needs != newest.started_with else "",
    )
