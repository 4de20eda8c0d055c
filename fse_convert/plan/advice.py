"""What to do with a checkpoint, a sentence per question: serve it as is, pad it for named servers, or neither and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fse_convert.errors import Problem
from fse_convert.model.description import Description
from fse_convert.model.moe import LayerKind
from fse_convert.plan.commands import conversion_command
from fse_convert.plan.plan import Decision, Options
from fse_convert.servers.commands import tensor_parallel_sizes
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.load_padding import needed_contract
from fse_convert.servers.release_names import Named, server_of
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import CONTRACT, TARGETS, Target, find_target
from fse_convert.servers.verdict import Outcome

TOPICS = {Question.NATIVE: "NVIDIA MegaMoE", Question.AITER: "AMD AITER", Question.SLOTS: "Slots"}
"""How each question's sentence begins."""
NO_PATH = frozenset({"model-unsupported", "aiter-family-unsupported"})
"""Reasons that say nothing about a checkpoint beyond its model type."""
V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
NOTHING_TO_FUSE = "No layer has a shared expert: there is nothing to fuse."
Decider = Callable[[Options], Decision | None]
"""What a conversion with some options would decide; None where it would refuse."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What padding changes, by engine and release: what would fuse, and what would at least run MegaMoE.

    ``target`` is what to convert for, a contract where its width is enough; ``options``: of that conversion.
    """

    target: Target
    fuses: tuple[Target, ...]
    runs: tuple[Target, ...]
    options: Options

    @property
    def contract(self) -> str:
        """The contract whose width the padded checkpoint has."""
        return needed_contract(self.target).name


@dataclass(frozen=True, slots=True)
class Advice:
    """The sentences, in order of importance, the command that they lead to, and what padding would change.

    ``fuses``: releases whose MegaMoE fuses the checkpoint, as is or padded; ``runs``: those that run MegaMoE at all.
    """

    sentences: tuple[str, ...] = ()
    command: str = ""
    gain: Gain | None = None
    fuses: tuple[Target, ...] = ()
    runs: tuple[Target, ...] = ()


def told_family(description: Description) -> str:
    """Name a model's family for people, DeepSeek-V4.1 apart from V4, whose row it shares; empty where no row knows it."""
    name = description.family_name
    return name and f"{name}{'.1' if description.model_type in V41_TYPES else ''}"


REQUANTISED = frozenset({"slot-requantised", "aiter-requantised"})
"""Notes of a fusion that does not compute with the checkpoint's own values."""
MISREAD_ELSEWHERE = "sglang-block-32"
"""The note of a fusion that is right in one way of starting the server alone."""


def advise(checkpoint: Subject, answers: Sequence[Answer], decide: Decider, tp: int = 1, address: str = "CHECKPOINT") -> Advice:
    """Say what to do; a command is named only if it would run. ``decide``: as `decider` makes it. ``address``: its path."""
    asked = {q: [a for a in answers if a.question is q and a.engine != CONTRACT] for q in Question}
    if not checkpoint.description.layers:
        return Advice()
    if not checkpoint.description.problems and not any(d.shared for d in checkpoint.description.layers):
        return Advice((NOTHING_TO_FUSE,))
    decoder = [i for i, d in enumerate(checkpoint.description.layers) if d.layer.kind is LayerKind.DECODER]
    sentences = [f"{TOPICS[q]}: {said_of(rows, decoder)}" for q, rows in asked.items() if rows]
    native = {a.name: a for a in asked[Question.NATIVE]}
    rows = [t for t in TARGETS if t.name in native]
    fused = [t for t in rows if native[t.name].fused]
    running = [t for t in rows if native[t.name].model.outcome in (Outcome.FUSED, Outcome.UNFUSED)]
    gain = _gain(native, rows, decide, tp)
    if gain:
        sentences.append(_padding_sentence(gain, rows, only=bool(fused)))
    return Advice(
        sentences=tuple(sentences),
        command=conversion_command(checkpoint, address, gain.options) if gain else "",
        gain=gain,
        fuses=tuple(t for t in rows if t in fused or (gain and t in gain.fuses)),
        runs=tuple(t for t in rows if t in running or (gain and t in gain.fuses + gain.runs)),
    )


def said_of(rows: Sequence[Answer], decoder: Sequence[int]) -> str:
    """Say who fuses a checkpoint, else why the newest release of the first server does not, and whom not to serve it with.

    ``decoder``: where the verdicts of decoder layers stand in an answer's.
    """
    fused = [a for a in rows if a.fused]
    changed = [a for a in fused if REQUANTISED.intersection(n.code for n in a.notes)]
    some = (Outcome.UNFUSED, Outcome.UNSAFE)
    partly = [
        a for a in rows if a.model.outcome in some and 0 < len(decoder) < len(a.layers) and all(a.layers[i].fused for i in decoder)
    ]
    unsafe = [a for a in rows if a.model.outcome is Outcome.UNSAFE]
    said = [
        f"{releases(chosen, rows)} fuse{'s' if len(chosen) == 1 else ''} {what}."
        for chosen, what in (
            ([a for a in fused if a not in changed], "this checkpoint as is"),
            (changed, "it with shared experts requantised while loading, so with other numbers"),
            (partly, "its decoder layers, and not the drafter"),
        )
        if chosen
    ]
    said = said or [_none(rows)]
    said += dict.fromkeys(f"{n.message}." for a in fused for n in a.notes if n.code == MISREAD_ELSEWHERE)
    if unsafe:
        hints = way_out(r.hint for r in unsafe[-1].model.reasons if r.hint)
        with_it = " with the drafter" if all(a in partly for a in unsafe) else ""
        said.append(f"{releases(unsafe, rows)} would fail to load it{with_it} or compute wrong numbers{hints}.")
    return " ".join(said)


def size_notes(answers: Sequence[Answer], tp: int) -> Iterator[Problem]:
    """Note which servers do not fuse at a tensor-parallel size, though they do at others; size 1 is that of nobody who asks."""
    for sizes in dict.fromkeys(tensor_parallel_sizes(a.started_with) for a in answers if a.fused):
        if sizes and tp > 1 and tp not in sizes:
            fused = [a for a in answers if a.fused and tensor_parallel_sizes(a.started_with) == sizes]
            fuse = f"{releases(fused, answers)} fuse{'s' if len(fused) == 1 else ''} this model"
            yield Problem("tp-unfused", f"{fuse} at tensor-parallel size {' or '.join(map(str, sizes))} only, not at {tp}", "--tp")


def way_out(hints: Iterable[str]) -> str:
    """Join hints, each of which may name alternatives; where all have some in common, those alone are enough."""
    ways = [hint.split(", or ") for hint in dict.fromkeys(hints)]
    common = [way for way in ways[0] if all(way in others for others in ways)] if ways else []
    said = ", or ".join(common) or "; ".join(", or ".join(way) for way in ways)
    return f": {said}" if said else ""


def _none(rows: Sequence[Answer]) -> str:
    """Say that nothing fuses, and why the newest release of the first server with a reason does not."""
    newest = {server_of(a): a for a in rows}.values()
    reasons = [(a, r) for a in newest if a.model.outcome is not Outcome.UNSAFE for r in a.model.reasons]
    telling = [(a, r) for a, r in reasons if r.code not in NO_PATH]
    if not reasons or (not telling and any(a.model.outcome is Outcome.UNSAFE for a in newest)):
        return "no known release fuses this checkpoint as is."
    if not telling and all(a.model.outcome is Outcome.UNKNOWN for a, _ in reasons):
        return "no known rule covers this model."
    if not telling:
        return "no known release has a path for this model."
    answer, reason = telling[0]
    none = "not known" if answer.model.outcome is Outcome.UNKNOWN else "no known release fuses this checkpoint as is"
    return f"{none}; {answer.engine} {answer.release}{_in_brackets([_way(answer, rows)])}: {reason.message.rstrip('.')}."


def _gain(native: Mapping[str, Answer], rows: Sequence[Target], decide: Decider, tp: int) -> Gain | None:
    """Find the targets for which padding changes something, and the one conversion that serves them all."""
    fuses, runs, widths = [], [], {}
    for target in rows:
        before = native[target.name].model
        decided = None if before.fused else decide(Options(target, tp=tp, allow_unfused=True))
        if decided is None or decided.at_kernel == decided.at_source:
            continue
        after = decided.server
        if after.fused:
            fuses.append(target)
        elif before.outcome is Outcome.REFUSED and after.outcome is Outcome.UNFUSED:
            runs.append(target)
        else:
            continue
        widths[target.name] = decided.width
    return _conversion(tuple(fuses), tuple(runs), widths, decide, tp) if widths else None


def _conversion(
    fuses: tuple[Target, ...], runs: tuple[Target, ...], widths: Mapping[str, int], decide: Decider, tp: int
) -> Gain | None:
    """Choose the contract, else the server, whose conversion is wide enough for all; first those that leave no layer unfused."""
    named = fuses + runs
    contract = find_target(max((needed_contract(t) for t in named), key=lambda c: c.width_multiple).name)
    widest = max(named, key=lambda t: widths[t.name])
    for target in (contract or widest, widest):
        for unfused in (False, True):
            options = Options(target, tp=tp, allow_unfused=unfused)
            decided = decide(options)
            if decided and decided.width >= widths[widest.name]:
                return Gain(target, fuses, runs, options)
    return None


def _way(row: Named, rows: Sequence[Named]) -> str:
    """Return the variant in a target's name, such as ``mega``; empty for the plain one."""
    plain = next(server_of(r) for r in rows if r.engine == row.engine)
    return server_of(row).removeprefix(plain).strip("-")


def releases(chosen: Iterable[Named], rows: Sequence[Named]) -> str:
    """Name releases by server: ``vLLM >= 0.31`` where all later known ones are among them, else one by one."""
    names, ways = {row.name for row in chosen}, dict[str, list[str]]()
    for server in dict.fromkeys(map(server_of, rows)):
        known = [row for row in rows if server_of(row) == server]
        mine = [row.release for row in known if row.name in names]
        if not mine:
            continue
        engine, way = known[0].engine, _way(known[0], rows)
        newest = [row.release for row in known[-len(mine) :]] == mine
        if len(known) == 1:
            ways[known[0].name if way else engine] = [""]
        else:
            ways.setdefault(f"{engine} {f'>= {mine[0]}' if newest else ', '.join(mine)}", []).append(way)
    parts = [f"{text}{_in_brackets(found)}" for text, found in ways.items()]
    return " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _in_brackets(ways: Sequence[str]) -> str:
    """Say in which ways releases are started: only plainly, plainly and also in others, or only in others."""
    others = ", ".join(way for way in ways if way)
    return f" ({'also ' if '' in ways else ''}{others})" if others else ""


def _padding_sentence(gain: Gain, rows: Sequence[Target], *, only: bool) -> str:
    parts = []
    if gain.fuses:
        parts.append(f"{releases(gain.fuses, rows)} (fusion turns on)")
    if gain.runs:
        parts.append(f"{releases(gain.runs, rows)} (MegaMoE refuses this width; padded it runs, the shared expert beside it)")
    return f"Pad only for {', or for '.join(parts)}." if only else f"Padding helps {', and '.join(parts)}."
