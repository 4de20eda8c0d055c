"""The answer to one question about one layer and one server: does its shared expert run fused, and if not, why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from fse_convert.errors import Problem

Reason = Problem
"""Why a layer is not fused, or what to know of a verdict. ``where`` is empty, so that a reason is the same in every layer."""


class Outcome(str, Enum):
    """The fate of a layer's shared expert in a server."""

    FUSED = "fused"
    UNFUSED = "unfused"
    UNSAFE = "unsafe"
    REFUSED = "refused"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with its reasons; a fused layer has none.

    ``UNSAFE``: the server starts, and then fails to load the layer or computes wrong numbers. ``REFUSED``: the server does not
    load the layer on this path. ``ERROR``: it raises. ``UNKNOWN``: the rules do not cover it.
    """

    outcome: Outcome
    reasons: tuple[Reason, ...] = ()

    @property
    def fused(self) -> bool:
        """True where the shared expert runs fused."""
        return self.outcome is Outcome.FUSED


FUSED = Verdict(Outcome.FUSED)
NO_SHARED_EXPERT = Verdict(Outcome.UNFUSED, (Reason("no-shared-expert", "the layer has no shared expert"),))


def because(outcome: Outcome, code: str, message: str, hint: str = "") -> Verdict:
    """Make a verdict of one reason."""
    return Verdict(outcome, (Reason(code, message, hint=hint),))


def not_understood(problems: Iterable[Problem]) -> Verdict:
    """Make the verdict of a layer that has problems; it does not name their places."""
    return Verdict(Outcome.UNKNOWN, tuple(replace(problem, where="") for problem in problems))


def whole(verdicts: tuple[Verdict, ...]) -> Verdict:
    """Make the model's verdict where each layer stands for itself: fused when all are, else the first worst, with every reason."""
    if not verdicts:
        return because(Outcome.UNFUSED, "no-moe-layers", "no layers with experts under the names of this family")
    order = (Outcome.UNSAFE, Outcome.ERROR, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.UNFUSED)
    outcomes = {v.outcome for v in verdicts}
    worst = next((outcome for outcome in order if outcome in outcomes), None)
    if worst is None:
        return FUSED
    return Verdict(worst, tuple(dict.fromkeys(r for v in verdicts for r in v.reasons)))
