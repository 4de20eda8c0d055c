"""What to do with a checkpoint, in sentences: serve it as it is, pad it for named servers, or neither and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fse_convert.eligibility import Answer, Question, Subject
from fse_convert.fusion.megamoe import Widths, native_verdict
from fse_convert.fusion.targets import TARGETS, Target, needed_contract
from fse_convert.fusion.verdict import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Gain:
    """What padding to a contract's width changes, by engine and release: what would fuse, and what would at least run MegaMoE."""

    contract: str
    fuses: tuple[Target, ...]
    runs: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """The sentences, in order of importance, the command that they lead to, and what padding would change."""

    sentences: tuple[str, ...]
    command: str = ""
    gain: Gain | None = None


def advise(checkpoint: Subject, answers: Sequence[Answer], widths: Mapping[str, int]) -> Advice:
    """Say what to do. ``widths``: of one expert by contract, as `planning.needed_width` gives them."""
    native = {a.name: a for a in answers if a.question is Question.NATIVE and a.engine != "contract"}
    if not native or not checkpoint.description.layers:
        return Advice(())
    rows = [t for t in TARGETS if t.name in native]
    fused = [t for t in rows if native[t.name].fused]
    gain = _gain(checkpoint, native, rows, widths)
    sentences = [f"{releases(fused, rows)} fuse this checkpoint as it is." if fused else _none(native, rows)]
    if gain:
        sentences.append(_padding_sentence(gain, rows, only=bool(fused)))
    command = f"fse-convert CHECKPOINT OUT --target {gain.contract}" if gain else ""
    return Advice(tuple(sentences), command, gain)


def _gain(checkpoint: Subject, native: Mapping[str, Answer], rows: Sequence[Target], widths: Mapping[str, int]) -> Gain | None:
    """Find the targets for which padding changes something; the widest contract among them is the one to convert for."""
    fuses, runs = [], []
    for target in rows:
        before = native[target.name].model
        after = _padded_verdict(checkpoint, target, widths)
        if after is None or before.fused:
            continue
        if after.fused:
            fuses.append(target)
        elif before.outcome is Outcome.REFUSED and after.outcome is Outcome.UNFUSED:
            runs.append(target)
    if not fuses and not runs:
        return None
    contract = max((needed_contract(t) for t in fuses + runs), key=lambda c: c.width_multiple)
    return Gain(contract.name, tuple(fuses), tuple(runs))


def _padded_verdict(checkpoint: Subject, target: Target, widths: Mapping[str, int]) -> Verdict | None:
    """Judge the whole model at the width that the target's contract needs; None where that is the width it has."""
    width = widths.get(needed_contract(target).name)
    description = checkpoint.description
    if width is None or len(description.widths) != 1 or width == description.widths[0]:
        return None
    verdicts = []
    for layer in description.layers:
        if layer.shared and layer.shared.width % description.widths[0]:
            return None
        n = layer.shared.width // description.widths[0] if layer.shared else 1
        verdicts.append(native_verdict(layer, target, checkpoint.config, Widths(width, n * width)))
    outcomes = {v.outcome for v in verdicts}
    return verdicts[0] if len(outcomes) == 1 else None


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
