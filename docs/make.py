#!/usr/bin/env python3
"""Makes what comes from the program: targets.md, families.md, codes.md, schema/, and inspect.svg from a real run.

python -m docs.make [CHECKPOINT]     without one, a DeepSeek-V4.1-shaped checkpoint is made for the screen
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fse_convert.codes import Kind, all_codes
from fse_convert.errors import FseConvertError
from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from fse_convert.model.families.stacked_only import STACKED_ONLY
from fse_convert.model.formats import StorageKind
from fse_convert.plan.advice import releases
from fse_convert.plan.decide import decide
from fse_convert.plan.plan import Options
from fse_convert.plan.source import describe_source
from fse_convert.report.schemas import RESPONSES, schema
from fse_convert.servers.aiter.families import AITER_FAMILIES
from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.config_keys import RULES
from fse_convert.servers.judge import Question
from fse_convert.servers.load_padding import ROUTED_PAD, needed_contract
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import CONTRACTS, TARGETS, Pairings, Target
from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.examples import example_of
from fse_convert.testing.memory import checkpoint
from tests.transformers_types import RUN

DOCS = Path(__file__).resolve().parent
COLUMNS = 118
NAME = "DeepSeek-V4.1-Flash"
HEAD = """# Targets

What `--target`, `inspect --target` and `--require` know, each row with the release and file that it was read from.
This file is made from the program's own data by `make docs`; edit the rows in `fse_convert/servers/`, not this file.
"""

FAMILY_COLUMNS = ("family", "`model_type`", "experts", "config keys of widths", "padded", "paths that fuse", "judged by", "read in")
FAMILIES_HEAD = """# Model families

How each family names its experts, which keys of config.json loaders build them from (padding edits every one that is there), and
what can be done with its models. Every family is inspected; `N` is a layer, `E` an expert. The storage format does not depend on
the family: BF16, F16, F32, FP8 by block, channel or tensor, MXFP8, MXFP4 and NVFP4 are padded alike. Tensors that hold all experts
of a layer are padded where the family has them, every expert at its own end, in the layout of its row: shapes do not tell it.
Where a row names such tensors alone, its releases are stored so; a checkpoint that stores every expert by itself is read all the
same.

*padded*: what `--tp N` decides for a small model of the family. *paths that fuse*: servers whose code for these model types can
fuse shared experts; whether it does, `inspect` says of a checkpoint. *judged by*: where a loader was run, it has built the model
from the source and from the padded output, and both gave equal logits (`tests/test_transformers.py`). Everything else in a row was
*read in* the files named last. How vLLM and SGLang cut padded experts for their ranks is run for every format, whatever the family
(`tests/peers`). A model type that is not listed, but named in the same way, is converted with `--family NAME`.
This file is made from the program's own data by `make docs`; edit the rows in `fse_convert/model/`, not this file.
"""

CODES_HEAD = """# Codes

What the program says has a code that stays: `error[...]`, `note[...]` and `mismatch[...]` in the terminal, `code` in JSON.
`fse-convert explain CODE` prints the same as this page. A code stands under the kind in which it is most frequent.
The problems of a checkpoint that stop `convert` are what `inspect` lists, and what `verify` reports of an output as mismatches.
This file is made by `make docs` from `fse_convert/codes.txt`.
"""


def screen(checkpoint: Path) -> str:
    """Return what ``fse-convert inspect`` prints about a checkpoint on a terminal, as SVG."""
    env = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "LINES": "60", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "fse_convert", "inspect", checkpoint.name]
    shown = subprocess.run(command, cwd=checkpoint.parent, env=env, check=True, capture_output=True, text=True).stdout
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(f"$ fse-convert inspect {checkpoint.name}"))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title="fse-convert inspect", unique_id="inspect")
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="what fse-convert inspect {checkpoint.name} prints" ', 1)
    return re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)  # a picture fetches nothing


def example(folder: Path) -> Path:
    """Make a checkpoint with the shapes of DeepSeek-V4.1-Flash, headers and config only: inspect reads no weights."""
    return make_checkpoint(folder / NAME, "v4.1-flash", real=True, sparse=True)


def targets_markdown() -> str:
    """Return the page: contracts, servers by their rules, and the two questions that only `inspect` asks."""
    return "\n".join((HEAD, *_contracts(), *_servers(), *_rules(), *_others())) + "\n"


def codes_markdown() -> str:
    """Return the page: every code by kind, what it means, and the way out."""
    return "\n".join((CODES_HEAD, *_codes())) + "\n"


def families_markdown() -> str:
    """Return the page: every family with its names and keys, what can be done with it, and what that was judged by."""
    return "\n".join((FAMILIES_HEAD, *_table(FAMILY_COLUMNS, map(_family, FAMILIES)))) + "\n"


def _family(family: Family) -> tuple[str, ...]:
    alone = "" if family in STACKED_ONLY else f"`{family.example}.experts.E.{{{','.join(family.routed_names)}}}`"
    routed = ", or ".join(filter(None, (alone, _stacks(family, "" if alone else f"{family.example}."))))
    shared = f"`{family.shared}.{{{','.join((*(s.name for s in family.fused), *family.shared_names))}}}`" if family.shared else ""
    keys = [f"`{w.key}` ({w.share.value})" for w in family.widths]
    keys += [f"`{w.key}` also read as that of {w.share.value}" for w in family.readings]
    return (
        family.name,
        ", ".join(f"`{t}`" for t in family.model_types),
        ", ".join(filter(None, (routed, shared))),
        ", ".join(keys),
        _padding(family),
        "; ".join(_paths(family)),
        _judge(family),
        family.source,
    )


def _stacks(family: Family, block: str) -> str:
    """Name the tensors that hold all routed experts of a layer, after ``block``, and how; empty where no release has any."""
    if not family.stacked:
        return ""
    stack = family.stacked[0]
    shape = "2 x width, hidden" if len(stack.roles) > 1 else "width, hidden"
    shape = ", ".join(reversed(shape.split(", "))) if stack.transposed else shape
    turn = ", gate and up in turn" if stack.interleaved else ""
    return f"of all experts `{block}{{{','.join(s.name for s in family.stacked)}}}`, the first `[E, {shape}]`{turn}"


def _judge(family: Family) -> str:
    """Name the loader that judged the family's models, how, and why none was run."""
    run = ", ".join(f"`{t}`" for t in family.model_types if t in RUN)
    why = "padding is refused" if family.refused else "transformers 5.24 has no such model"
    return f"transformers 5.24, run: {run}" if run else f"read: {why}"


def _padding(family: Family) -> str:
    """Say whether a conversion of a small model of the family would pad it."""
    try:
        decided = decide(describe_source(checkpoint(*example_of(family))), Options(None, tp=512))
    except FseConvertError as e:
        return f"no: {e.problems[0].message} (`{e.problems[0].code}`)"
    return "yes" if decided.pads else "no"


def _paths(family: Family) -> Iterator[str]:
    """Name the servers whose code for these model types can fuse shared experts, where a checkpoint's format lets them."""
    types = set(family.model_types)
    native = [t for t in TARGETS if not t.is_contract and t.fuses and types & t.model_types]
    if native:
        yield f"MegaMoE: {releases(native, [t for t in TARGETS if not t.is_contract and t.fuses])}"
    rocm = [f.since for f in AITER_FAMILIES if f.since and types & set(f.model_types)]
    if rocm:
        yield f"AITER: vLLM >= {min(rocm)}"
    slots = [t for t in SLOT_TARGETS if types & t.model_types]
    if slots:
        yield f"slots: {releases(slots, SLOT_TARGETS)}"


def _codes() -> Iterator[str]:
    for kind in Kind:
        yield f"## {kind.heading}\n"
        codes = [c for c in all_codes().values() if c.kinds[0] is kind]
        head = ("code", "also a", "meaning", "way out")
        yield from _table(head, ((f"`{c.name}`", ", ".join(k.value for k in c.kinds[1:]), c.meaning, c.way_out) for c in codes))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield _row(("---",) * len(head))
    yield from map(_row, rows)
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") or "-" for cell in cells) + " |"


def _contracts() -> Iterator[str]:
    yield "## Kernel contracts\n\nWhat a generation of DeepGEMM's MegaMoE kernel asks of shapes.\n"
    head = ("contract", "width of one expert", "hidden size", "kernels", "source")
    yield from _table(
        head,
        (
            (f"`{c.name}`", f"multiple of {c.width_multiple}", f"multiple of {c.hidden_multiple}", c.kernels, c.source)
            for c in CONTRACTS.values()
        ),
    )


def _servers() -> Iterator[str]:
    yield f"## {Question.NATIVE.heading}\n"
    yield "*Converted for* is the contract that `--target` pads to; it is stricter than the kernel's own where the server pads"
    yield "routed experts itself and demands the same width of shared ones.\n"
    servers = [t for t in TARGETS if not t.is_contract]
    head = ("target", "kernel", "converted for", "fuses shared experts", "models", "started with", "source")
    yield from _table(
        head,
        (
            (
                f"`{t.name}`",
                t.contract.name,
                needed_contract(t).name,
                "yes" if t.fuses else "no",
                ", ".join(sorted(t.model_types)) or "any",
                t.started_with,
                t.source,
            )
            for t in servers
        ),
    )


def _rules() -> Iterator[str]:
    yield "### Rules of their own\n"
    for target in TARGETS:
        rules = list(_rules_of(target))
        if rules:
            yield f"* `{target.name}`: {'; '.join(rules)}."
    yield ""


def _rules_of(target: Target) -> Iterator[str]:
    yield f"fuses {_pairings(target.pairings)}" if target.fuses else f"runs {_routed(target.pairings)} experts, shared ones beside"
    if target.name in ROUTED_PAD:
        yield f"pads routed experts to a multiple of {ROUTED_PAD[target.name]} at load"
    if target.hidden_multiple:
        yield f"hidden size a multiple of {target.hidden_multiple}"
    for kind, (width, hidden) in target.multiples.items():
        yield f"with {kind.value} experts: width a multiple of {width}, hidden size of {hidden}"
    if target.shared_blocks:
        blocks = ", ".join(f"{n}x{k}" for n, k in target.shared_blocks)
        yield f"shared experts with {blocks} scale blocks only"
    yield f"shared scales {', '.join(target.scale_dtypes)}"
    native = (rule for kind in sorted(target.model_types) for rule in RULES if rule.covers(target, kind, native=True))
    for rule in dict.fromkeys(native):
        yield f"config `{rule.keys[0]}` {rule.takes.what}"
    if target.beside:
        yield f"{', '.join(sorted(target.beside))}: MegaMoE with the shared expert beside it"


def _pairings(pairings: Pairings) -> str:
    return ", ".join(
        f"{routed.value} experts with {' or '.join(k.value for k in shared)} shared ones" if shared else f"{routed.value} alone"
        for routed, shared in pairings.items()
    )


def _routed(pairings: Pairings) -> str:
    return ", ".join(StorageKind(k).value for k in pairings)


def _others() -> Iterator[str]:
    yield f"## {Question.AITER.heading}\n\nSource: {AITER_TARGETS[0].source}\n"
    yield from _table(("target", "release", "started with"), ((f"`{t.name}`", t.release, t.started_with) for t in AITER_TARGETS))
    yield f"## {Question.SLOTS.heading}\n"
    head = ("target", "server", "started with", "source")
    rows = ((f"`{t.name}`", f"{t.engine} {t.release}", t.started_with, t.source) for t in SLOT_TARGETS)
    yield from _table(head, rows)


def main() -> None:
    """Write all."""
    (DOCS / "codes.md").write_text(codes_markdown(), encoding="utf-8")
    (DOCS / "families.md").write_text(families_markdown(), encoding="utf-8")
    for command in RESPONSES:
        (DOCS / "schema" / f"{command}.json").write_text(schema(command) + "\n", encoding="utf-8")
    (DOCS / "targets.md").write_text(targets_markdown(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as work:
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else example(Path(work))
        (DOCS / "inspect.svg").write_text(screen(source), encoding="utf-8")


if __name__ == "__main__":
    main()
