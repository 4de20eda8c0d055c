"""The phases of a proof that compute, for progress; without torch, which is still being imported when they are counted."""

from __future__ import annotations

from fse_convert.progress import Phase, Work
from fse_convert.verification.findings import Level


def computed_work(level: Level, layers: int, recoded: int) -> list[Work]:
    """Return the phases that compute, for progress: a level above storage each, where it can run on this machine.

    ``layers``: those with the kernel layout; ``recoded``: how many more are computed with numerics because formats changed.
    """
    found = []
    if level.rank >= Level.NUMERICS.rank:
        found.append(Work(Phase.NUMERICS, "layer", layers + recoded))
    if level is Level.KERNEL:
        from fse_convert.verification.gpu_kernel import probe

        found += [Work(Phase.KERNEL, "layer", layers)] if probe().status != "unavailable" else []
    return found
