"""Whether a checkpoint loads at a tensor-parallel size, server by server, and the width at which it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fse_convert.errors import InvalidCheckpoint, size
from fse_convert.plan.advice import Decider
from fse_convert.plan.commands import conversion_command
from fse_convert.plan.costs import padding
from fse_convert.plan.plan import Options, grows_apart
from fse_convert.plan.width_rounding import needed_widths, stored_widths
from fse_convert.servers.subject import Subject
from fse_convert.servers.tensor_parallel import ENGINES, Load, Slices, slices

SAID = {
    Load.UNSERVED: "does not serve this model in FP8 at any width:",
    Load.WHOLE: "loads",
    Load.REFINED: "makes scale blocks finer while loading, which only some of its kernels take, for",
    Load.PADDED: "pads by itself",
    Load.REFUSED: "refuses",
    Load.WRONG: "loads with the scales of other columns, so with wrong numbers,",
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """What servers make of a checkpoint's experts on ``tp`` ranks.

    ``width`` and ``needed``: of one routed expert as it is, and the smallest that all known loaders take as it is. ``shared``:
    that of a shared MLP with a width of its own, 0 where it follows the routed one. ``bytes``: by which padding to them grows the
    checkpoint. ``command``: does that; empty where nothing need be done, or a conversion would refuse.
    """

    tp: int
    slices: tuple[Slices, ...]
    width: int
    needed: int
    shared: int
    bytes: int
    command: str

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield a sentence per server, and one about the width that all would take, with its command."""
        for engine in ENGINES:
            said = []
            for s in (s for s in self.slices if s.engine == engine):
                whose = "shared" if s.shared else "routed"
                even = "" if s.rank * self.tp == s.width else " and a part"
                why = f", a multiple of {s.multiple}" if s.load is Load.WHOLE else f", not whole blocks of {s.multiple}"
                told = s.multiple > 1 and s.load is not Load.UNSERVED
                said.append(f"{SAID[s.load]} {whose} experts, {s.rank}{even} wide per rank{why if told else ''}")
            if said:
                yield f"TP {self.tp}: {engine} {'; '.join(said)}.", ""
        if self.needed != self.width or self.shared:
            own = f", with a shared expert of {self.shared}," if self.shared else ""
            work = f"{size(self.bytes)} more on disk, {100 * (self.needed / self.width - 1):.0f} % more expert arithmetic"
            yield (
                f"TP {self.tp}: {self.needed}{own} is the smallest width that all known loaders take as it is: {work}.",
                self.command,
            )


def ranks(checkpoint: Subject, decide: Decider, tp: int, address: str) -> Ranks | None:
    """Work it out for ``tp`` ranks; None for one rank, and for experts without one width. ``address``: the checkpoint's path."""
    description = checkpoint.description
    if tp == 1 or description.problems:
        return None
    try:
        width = stored_widths(description)
    except InvalidCheckpoint:
        return None
    options = Options(None, tp=tp)
    needed = needed_widths(checkpoint, options, width)
    pads = needed != width and decide(options)
    return Ranks(
        tp=tp,
        slices=tuple(s for engine in ENGINES for s in slices(checkpoint, engine, tp)),
        width=width.routed,
        needed=needed.routed,
        shared=needed.shared if needed != width and grows_apart(width, needed) else 0,
        bytes=padding(description, needed).disk,
        command=conversion_command(checkpoint, address, options) if pads else "",
    )
