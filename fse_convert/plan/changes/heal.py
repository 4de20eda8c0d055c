from fse_convert.plan.changes.change import FormatChange
from fse_convert.plan.source import Source


def heals(source: Source) -> tuple[FormatChange, ...]:
    return ()
