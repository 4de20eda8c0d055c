"""The answer to one question about one layer and one server: does its shared expert run fused, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):
    """What the server does with a layer's shared expert."""

    FUSED = "fused"
    UNFUSED = "unfused"
    REFUSED = "refused"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a layer is not fused: a stable code, what was expected and found, and what to do about it."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with its reasons; a fused layer has none.

    ``REFUSED``: the server does not load the layer on this path. ``ERROR``: it raises. ``UNKNOWN``: the rules do not cover it.
    """

    outcome: Outcome
    reasons: tuple[Reason, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether the shared expert runs fused."""
        return self.outcome is Outcome.FUSED


FUSED = Verdict(Outcome.FUSED)


def whole(verdicts: tuple[Verdict, ...]) -> Verdict:
    """The model's verdict where each layer stands for itself: fused when all are, else the first worst, with every reason."""
    if not verdicts:
        return Verdict(Outcome.UNFUSED, (Reason("no-moe-layers", "there is no layer with experts"),))
    order = (Outcome.ERROR, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.UNFUSED)
    found = {v.outcome for v in verdicts}
    worst = next((outcome for outcome in order if outcome in found), None)
    if worst is None:
        return FUSED
    return Verdict(worst, tuple(dict.fromkeys(r for v in verdicts for r in v.reasons)))
