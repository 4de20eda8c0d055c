"""The Python API: one function per command, with the objects that the command line itself uses. See docs/api.md."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fse_convert.checkpoint.hub import fetch
from fse_convert.conversion.run import Conversion, ConversionResult, Request
from fse_convert.errors import FseConvertError, Problem, environment
from fse_convert.inspection import Inspection, open_folder
from fse_convert.inspection import inspect as inspect_folder
from fse_convert.output.copying import Link
from fse_convert.output.parts import Part
from fse_convert.plan.costs import Serving
from fse_convert.plan.plan import Experts, Options
from fse_convert.progress import Observer, ignore
from fse_convert.restoration.run import Restoration, Restored
from fse_convert.servers.judge import ALL_TARGETS, AnyTarget, find_any
from fse_convert.servers.release_names import find_named
from fse_convert.verification.findings import Level
from fse_convert.verification.proof import Check, Proof
from fse_convert.verification.proof import verify as verify_output
from fse_convert.verification.sample import Sample

__all__ = [
    "Conversion",
    "ConversionResult",
    "Experts",
    "FseConvertError",
    "Inspection",
    "Level",
    "Link",
    "Options",
    "Part",
    "Problem",
    "Proof",
    "Request",
    "Restored",
    "convert",
    "inspect",
    "restore",
    "target",
    "verify",
]
StrPath = str | os.PathLike[str]


def target(name: str) -> AnyTarget:
    """Return the kernel contract or server row of that name, as ``fse-convert targets`` lists them. Raises UsageError."""
    return find_any(name)


def inspect(checkpoint: StrPath, *, tp: int = 1, ep: int = 8, targets: Iterable[str] = (), thorough: bool = False) -> Inspection:
    """Tell which servers fuse a checkpoint's shared experts, layer by layer, and what it costs.

    ``checkpoint``: a folder, or ``hf://org/name[@revision]``. ``tp``, ``ep``: tensor- and expert-parallel size, for widths and
    costs. ``targets``: judge these only. ``thorough``: also read the F32 scales of routed experts, as ``--require`` does.
    Raises UsageError, InvalidCheckpoint when there is no such folder, EnvironmentFailure.
    """
    address = os.fspath(checkpoint)
    names = frozenset(find_named(name, ALL_TARGETS).name for name in targets)
    with environment(address):
        return inspect_folder(open_folder(address), Serving(tp, ep), names, thorough=thorough)


def convert(
    checkpoint: StrPath,
    out: StrPath,
    options: Options | None = None,
    *,
    level: Level = Level.NUMERICS,
    overwrite: bool = False,
    workers: int = 2,
    observe: Observer = ignore,
) -> ConversionResult:
    """Convert a checkpoint; ``out`` exists afterwards, complete and proved up to ``level``, or not at all.

    ``checkpoint``: a folder, or ``hf://org/name[@revision]``, which is downloaded into the Hub's own cache.
    ``options``: what to convert for; megamoe-512 by default. `Conversion` with a `Request` has everything the command line has:
    links, parts, Ray, the plan and the estimate before anything is written.
    Raises UsageError, InvalidCheckpoint, NotConvertible, VerificationFailure, EnvironmentFailure, Locked.
    """
    options = options or Options(target("megamoe-512"))
    source = fetch(os.fspath(checkpoint))
    request = Request(source=source, out=Path(out), options=options, overwrite=overwrite, verify=level, workers=workers)
    return Conversion(request).run(observe)


def verify(
    out: StrPath,
    source: StrPath | None = None,
    *,
    level: Level | None = None,
    sample: int | None = None,
    device: str = "auto",
    strict: bool = False,
    observe: Observer = ignore,
) -> Proof:
    """Prove an output again, against its source or, without one, against the digests in its own manifest.

    ``level``: as far as there is something to run on by default. ``sample``: look at so many tensors, chosen at random.
    ``strict``: also fail for a model card, a licence or a picture that was added or edited since.
    Raises InvalidCheckpoint when ``out`` is not an output or the source is broken, EnvironmentFailure. A mismatch is not
    raised: see `Proof.failed` and `Proof.exit_code`.
    """
    check = Check(
        out=Path(out),
        source=None if source is None else fetch(os.fspath(source)),
        level=level,
        sample=None if sample is None else Sample(sample),
        device=device,
        strict=strict,
    )
    return verify_output(check, observe)


def restore(
    out: StrPath, original: StrPath, *, link: Link = Link.AUTO, strict: bool = False, observe: Observer = ignore
) -> Restored:
    """Give the source of an output back, bit for bit, without needing it.

    A model card, a licence or a picture that was added or edited since the conversion comes as it is now, unless ``strict``.

    Raises InvalidCheckpoint when ``out`` is not an output, VerificationFailure when it is damaged, UsageError, EnvironmentFailure.
    """
    return Restoration(Path(out), Path(original), link, strict=strict).run(observe)
