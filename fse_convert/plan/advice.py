"""What to do with a checkpoint, in sentences: serve it as is, pad it for named servers, or neither and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fse_convert.plan.plan import Decision, Options
from fse_convert.servers.judge import Answer, Question
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import CONTRACT, TARGETS, Target, find_target, needed_contract
from fse_convert.servers.verdict import Outcome

Plans = Callable[[Options], Decision | None]
"""What a conversion with some options would decide; None where it would refuse."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What padding changes, by engine and release: what would fuse, and what would at least run MegaMoE.

    ``target`` is what to convert for, a contract where its width is enough; ``unfused``: whether some layers must pass unfused.
    """

    target: Target
    fuses: tuple[Target, ...]
    runs: tuple[Target, ...]
    unfused: bool

    @property
    def contract(self) -> str:
        """The contract whose width the padded checkpoint has."""
        return needed_contract(self.target).name


@dataclass(frozen=True, slots=True)
class Advice:
    """The sentences, in order of importance, the command that they lead to, and what padding would change."""

    sentences: tuple[str, ...]
    command: str = ""
    gain: Gain | None = None


def advise(checkpoint: Subject, answers: Sequence[Answer], plans: Plans, tp: int = 1) -> Advice:
    """Say what to do; a command is named only if it would run. ``plans``: as `planning.planner` makes it."""
    native = {a.name: a for a in answers if a.question is Question.NATIVE and a.engine != CONTRACT}
    if not native or not checkpoint.description.layers:
        return Advice(())
    rows = [t for t in TARGETS if t.name in native]
    fused = [t for t in rows if native[t.name].fused]
    gain = _gain(native, rows, plans, tp)
    sentences = [f"{releases(fused, rows)} fuse this checkpoint as it is." if fused else _none(native, rows)]
    if gain:
        sentences.append(_padding_sentence(gain, rows, only=bool(fused)))
    return Advice(tuple(sentences), _command(gain, tp) if gain else "", gain)


def _command(gain: Gain, tp: int) -> str:
    options = [f"--tp {tp}"] * (tp > 1) + ["--allow-unfused"] * gain.unfused
    return " ".join(["fse-convert CHECKPOINT OUT --target", gain.target.name, *options])


def _gain(native: Mapping[str, Answer], rows: Sequence[Target], plans: Plans, tp: int) -> Gain | None:
    """Find the targets for which padding changes something, and the one conversion that serves them all."""
    fuses, runs, widths = [], [], {}
    for target in rows:
        before = native[target.name].model
        decided = None if before.fused else plans(Options(target, tp=tp, allow_unfused=True))
        if decided is None or decided.width == decided.source_width:
            continue
        after = decided.server
        if after.fused:
            fuses.append(target)
        elif before.outcome is Outcome.REFUSED and after.outcome is Outcome.UNFUSED:
            runs.append(target)
        else:
            continue
        widths[target.name] = decided.width
    return _conversion(tuple(fuses), tuple(runs), widths, plans, tp) if widths else None


def _conversion(
    fuses: tuple[Target, ...], runs: tuple[Target, ...], widths: Mapping[str, int], plans: Plans, tp: int
) -> Gain | None:
    """Choose the contract, else the server, whose conversion is wide enough for all; first those that leave no layer unfused."""
    named = fuses + runs
    contract = find_target(max((needed_contract(t) for t in named), key=lambda c: c.width_multiple).name)
    widest = max(named, key=lambda t: widths[t.name])
    for target in (contract or widest, widest):
        for unfused in (False, True):
            decided = plans(Options(target, tp=tp, allow_unfused=unfused))
            if decided and decided.width >= widths[widest.name]:
                return Gain(target, fuses, runs, unfused)
    return None


def releases(targets: Iterable[Target], rows: Sequence[Target]) -> str:
    """Name releases by engine: ``vLLM >= 0.31`` where all later known ones are among them, else one by one."""
    chosen = list(targets)
    parts = []
    for engine in dict.fromkeys(t.engine for t in chosen):
        known = [t.release for t in rows if t.engine == engine]
        mine = [t.release for t in chosen if t.engine == engine]
        newest = known[-len(mine) :] == mine
        text = f">= {mine[0]}" if newest and len(known) > 1 else ", ".join(mine)
        parts.append(f"{engine} {text}" if len(known) > 1 else engine)
    return " and ".join(parts) if len(parts) < 3 else ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _none(native: Mapping[str, Answer], rows: Sequence[Target]) -> str:
    """Say that nothing fuses, and why the newest release of the first engine does not."""
    newest = [next(t for t in reversed(rows) if t.engine == engine) for engine in dict.fromkeys(t.engine for t in rows)]
    reasons = [(t, r) for t in newest for r in native[t.name].model.reasons]
    if all(r.code == "model-unsupported" for _, r in reasons):
        return "No server release that is known here has a MegaMoE path for this model."
    target, reason = next((t, r) for t, r in reasons if r.code != "model-unsupported")
    return (
        f"No server release that is known here fuses this checkpoint as it is; {target.engine} {target.release}: {reason.message}."
    )


def _padding_sentence(gain: Gain, rows: Sequence[Target], *, only: bool) -> str:
    parts = []
    if gain.fuses:
        parts.append(f"{releases(gain.fuses, rows)} (fusion turns on)")
    if gain.runs:
        parts.append(f"{releases(gain.runs, rows)} (MegaMoE refuses this width; padded it runs, the shared expert beside it)")
    return f"Pad only for {', or for '.join(parts)}." if only else f"Padding helps {', and '.join(parts)}."
