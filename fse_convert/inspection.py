"""One inspection as one call: read headers, describe, judge, add up costs, advise.

Of the payload nothing is read but F32 scales of a local checkpoint's experts, which decide whether E8M0 can hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fse_convert.checkpoint.folder import Folder, LocalFolder
from fse_convert.checkpoint.names import CONFIG, QUANT_CONFIG
from fse_convert.checkpoint.reader import Checkpoint, PartialCheckpoint, garbage_collection_paused, read_checkpoint
from fse_convert.errors import FseConvertError, Problem, folded
from fse_convert.exit_codes import ExitCode, of_inspection
from fse_convert.model.config_against_tensors import LOAD_CONFLICTS, UNFIT
from fse_convert.model.description import NOT_UNDERSTOOD, Description
from fse_convert.model.moe import LayerKind
from fse_convert.plan.advice import Advice, Decider, advise, size_notes
from fse_convert.plan.costs import Costs, Serving, costs
from fse_convert.plan.decide import decider
from fse_convert.plan.offers import Offers, make_offers
from fse_convert.plan.plan import Options
from fse_convert.plan.ranks import Ranks, ranks
from fse_convert.plan.source import Source, describe_source, read_scales
from fse_convert.plan.width_rounding import contract_widths
from fse_convert.servers.f32_scales import UNREAD, Scales
from fse_convert.servers.judge import Answer, judge
from fse_convert.servers.native import WIDTHS
from fse_convert.servers.release_names import find_named
from fse_convert.servers.subject import Subject
from fse_convert.servers.targets import find_target
from fse_convert.servers.verdict import Outcome, Verdict, because, not_understood
from fse_convert.sidecar.manifest import read_manifest
from fse_convert.sidecar.reader import read_sidecar

LEFT_OUT = "the drafter's layers are not judged: the verdicts are those of serving without speculative decoding"


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that was found.

    ``problems``: what is broken; ``unsupported``: what is whole but not understood; ``conflicts``: where config and headers
    contradict each other in what a change of the config may mend; ``notes``: what to know.
    ``costs`` is None without experts of one width. ``converted``: whether fse-convert wrote the folder. ``offers``: changes of
    format that would help. ``ranks``: what servers make of its experts under tensor parallelism, where that was asked.
    """

    checkpoint: Checkpoint
    subject: Subject
    answers: tuple[Answer, ...]
    costs: Costs | None
    advice: Advice
    problems: tuple[Problem, ...]
    unsupported: tuple[Problem, ...]
    conflicts: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    converted: bool
    offers: Offers = field(default_factory=Offers)
    ranks: Ranks | None = None

    @property
    def description(self) -> Description:
        """The layers."""
        return self.subject.description

    def failing(self, names: Iterable[str]) -> tuple[Answer, ...]:
        """Return the answers of those targets that do not fuse every layer. Raises UsageError for a target that was not judged."""
        wanted = [find_named(name, self.answers, "--require") for name in names]
        return tuple(a for a in self.answers if a in wanted and not a.fused)

    def exit_code(self, required: Iterable[str]) -> ExitCode:
        """Return what ``inspect --require`` exits with. Raises UsageError for a required target that was not judged."""
        return of_inspection(broken=bool(self.problems), required_fuse=not (self.problems or self.failing(required)))


@garbage_collection_paused()
def inspect(
    folder: Folder,
    serving: Serving,
    names: frozenset[str] = frozenset(),
    *,
    thorough: bool = False,
    family: str = "",
    drafter: bool = True,
) -> Inspection:
    """Inspect a checkpoint for all targets, or for those of ``names``; a broken one is described as far as it can be read.

    ``family``: its name, for a model type that is not known. ``thorough``: also read the F32 scales of routed experts, thousands
    of small tensors, where the folder is local. ``drafter``: whether layers of the drafter are judged; not where nobody serves it.
    Raises InvalidCheckpoint only when there is no such folder, OSError when the machine or the network refuses.
    """
    reading = read_checkpoint(folder)
    checkpoint = reading.checkpoint
    source = describe_source(checkpoint, family)
    source = replace(source, scales=_scales(reading, source, thorough=thorough))
    description, about = source.description, source.subject
    layers = tuple(d for d in description.layers if drafter or d.layer.kind is LayerKind.DECODER)
    about = replace(about, description=replace(description, layers=layers))
    left_out = [Problem("drafter-left-out", LEFT_OUT)] * (len(layers) < len(description.layers))
    decide = (lambda _: None) if reading.problems or reading.converted else decider(source)
    widths = contract_widths(about, serving.tp)
    problems = _layer_problems(reading, description)
    broken = folded((*reading.problems, *_sidecar_problems(reading), *(p for p in problems if p.code not in NOT_UNDERSTOOD)))
    unsupported = folded(p for p in problems if p.code in NOT_UNDERSTOOD)
    conflicts: tuple[Problem, ...] = ()
    if {CONFIG, QUANT_CONFIG}.isdisjoint(reading.unread):
        conflicts = tuple(c for c in description.conflicts if c not in problems)
    doubt = _doubt(broken, unsupported, conflicts)
    judged = (_with_true_hints(a, decide) for a in judge(about))
    answers = tuple(_doubted(a, doubt, broken=bool(broken)) if doubt else a for a in judged)
    asked = tuple(a for a in answers if not names or a.name in names)
    return Inspection(
        checkpoint,
        about,
        asked,
        costs(description, serving, widths) if description.widths else None,
        advise(about, answers, decide, serving.tp, address=folder.label),
        broken,
        unsupported,
        conflicts,
        (*checkpoint.notes, *left_out, *size_notes(asked, serving.tp), *_kept_scales(source.scales)),
        reading.converted,
        Offers() if broken or reading.converted else make_offers(asked, source, serving.tp),
        None if broken else ranks(about, decide, serving.tp, folder.label),
    )


def _with_true_hints(answer: Answer, decide: Decider) -> Answer:
    """Keep the hint to convert for a target only where that conversion would run, and the server its output."""
    target = find_target(answer.name)
    if target is None or not any(r.code in WIDTHS and r.hint for v in (answer.model, *answer.layers) for r in v.reasons):
        return answer
    decision = decide(Options(target))
    if decision and (target.is_contract or decision.server.outcome in (Outcome.FUSED, Outcome.UNFUSED)):
        return answer

    def bare(v: Verdict) -> Verdict:
        return replace(v, reasons=tuple(replace(r, hint="") if r.code in WIDTHS else r for r in v.reasons))

    return replace(answer, model=bare(answer.model), layers=tuple(map(bare, answer.layers)))


def _doubt(broken: Sequence[Problem], unsupported: Sequence[Problem], conflicts: Sequence[Problem]) -> Verdict | None:
    """Return what stands in the place of a yes for a checkpoint that is broken, not understood, or would not load."""
    if broken:
        message = "the checkpoint is broken: what a server makes of it is known once it is mended"
        return because(Outcome.UNKNOWN, "checkpoint-broken", message, "mend what the errors name")
    if unsupported:
        return not_understood(unsupported)
    unloadable = tuple(Problem(c.code, str(c), hint=c.hint) for c in conflicts if c.code in LOAD_CONFLICTS)
    return Verdict(Outcome.UNSAFE, unloadable) if unloadable else None


def _doubted(answer: Answer, doubt: Verdict, *, broken: bool) -> Answer:
    """Replace every yes of an answer, and of a broken checkpoint every `Outcome.UNSAFE`; a model with a yes in it is no safer."""
    withdrawn = (Outcome.FUSED, Outcome.UNSAFE) if broken else (Outcome.FUSED,)
    unloadable = doubt.outcome is Outcome.UNSAFE and answer.model.outcome is Outcome.UNFUSED and any(v.fused for v in answer.layers)
    without_layers = broken and not answer.layers
    model = doubt if answer.model.outcome in withdrawn or unloadable or without_layers else answer.model
    return replace(answer, model=model, layers=tuple(doubt if v.outcome in withdrawn else v for v in answer.layers))


def _sidecar_problems(reading: PartialCheckpoint) -> tuple[Problem, ...]:
    """Return what is wrong with manifest and kernel layout of an output, which `verify`, `restore` and its loaders would refuse."""
    if not reading.converted:
        return ()
    try:
        read_manifest(reading.checkpoint.folder)
    except FseConvertError as e:
        return tuple(e.problems)
    return read_sidecar(reading.checkpoint.folder).problems


def _scales(reading: PartialCheckpoint, source: Source, *, thorough: bool) -> Scales:
    """Read F32 scales where that costs no download and the headers can be trusted."""
    if reading.problems or not isinstance(source.checkpoint.folder, LocalFolder):
        return UNREAD
    return read_scales(source, routed=thorough)


def _kept_scales(scales: Scales) -> Iterator[Problem]:
    """Say why F32 scales that are not powers of two stay as they are, where some were read."""
    if scales.inexact:
        message = (
            f"{len(scales.inexact):,} of {len(scales.read):,} F32 scale tensors that were read hold values that are not powers of"
            " two and stay as they are: rounding changes weights by 2.65 % (relative L2), and no fusion of FP8 experts needs it"
        )
        yield Problem("scales-kept", message)


def open_folder(address: str) -> Folder:
    """Open a folder of this machine, or ``hf://org/name[@revision]`` on the Hub.

    Raises UsageError, InvalidCheckpoint or EnvironmentFailure when there is none or it cannot be reached.
    """
    if address.startswith("hf://"):
        from fse_convert.checkpoint.hub import HubFolder

        return HubFolder(address)
    return LocalFolder(Path(address))


def _layer_problems(reading: PartialCheckpoint, description: Description) -> tuple[Problem, ...]:
    """Return what is wrong with layers and config, but for what is so only because a whole shard or the config is missing."""
    if CONFIG in reading.unread:
        return ()
    shards = {name[:dot] for name in reading.absent or () for dot in _dots(name)}
    found = [
        p
        for d in description.layers
        for p in d.problems
        if not (p.code.endswith("-missing") and (reading.absent is None or d.layer.name in shards))
    ]
    if reading.absent == ():
        found += [*description.gaps, *(c for c in description.conflicts if c.code in UNFIT)]
    return (*found, *description.outside)


def _dots(name: str) -> Iterator[int]:
    at = name.find(".")
    while at >= 0:
        yield at
        at = name.find(".", at + 1)
