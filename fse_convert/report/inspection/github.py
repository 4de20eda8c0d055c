"""An inspection as the annotations that GitHub Actions shows beside a run."""

from __future__ import annotations

from collections.abc import Sequence

from fse_convert.inspection import Inspection


def workflow_commands(found: Inspection, required: Sequence[str]) -> list[str]:
    """Return workflow commands: errors for what is broken and for required targets that do not fuse, warnings for conflicts."""
    lines = [_command("error", p.code, str(p)) for p in (*found.problems, *(found.contradictions if required else ()))]
    for answer in found.failing(required):
        for reason in answer.model.reasons:
            lines.append(_command("error", f"{answer.name} does not fuse", f"{reason.code}: {reason.message}"))
    lines += [_command("warning", p.code, str(p)) for p in (*found.unsupported, *found.conflicts)]
    doubted = (a for a in found.answers if a.name in required and a.fused)
    lines += [_command("warning", f"{a.name}: {n.code}", n.message) for a in doubted for n in a.notes]
    return lines


def _command(level: str, title: str, message: str) -> str:
    """Return one command, with what GitHub would read as its syntax escaped."""
    return f"::{level} title={_escaped(title).replace(':', '%3A').replace(',', '%2C')}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
