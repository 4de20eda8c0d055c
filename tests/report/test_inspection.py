"""How an inspection is put into words: labels, folded layers, footnotes, strips that fit, escapes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fse_convert.errors import Problem, folded
from fse_convert.inspection import Inspection
from fse_convert.plan.advice import advise
from fse_convert.plan.costs import Serving, costs
from fse_convert.plan.planner import planner
from fse_convert.plan.source import describe_source
from fse_convert.plan.widths import contract_widths
from fse_convert.report.console import span
from fse_convert.report.inspection.github import workflow_commands
from fse_convert.report.inspection.pages import markdown
from fse_convert.report.inspection.text import text
from fse_convert.report.inspection.view import Row, View, cost_rows, gib, layer_rows, sections
from fse_convert.servers.judge import Subject, judge
from fse_convert.servers.verdict import FUSED, Outcome, Reason, Verdict
from fse_convert.testing.memory import Model, checkpoint
from tests.releases import FROM_031, NEWEST


def inspection(model: Model, serving: Serving | None = None, problems: tuple[Problem, ...] = ()) -> Inspection:
    about: Subject = model.subject()
    answers = judge(about)
    widths = contract_widths(about.description, 1)
    opened = checkpoint(about.config, model.tensors())
    return Inspection(
        checkpoint=opened,
        subject=about,
        answers=answers,
        costs=costs(about.description, serving or Serving(), widths),
        advice=advise(about, answers, planner(describe_source(opened))),
        problems=problems,
        unsupported=(),
        conflicts=(),
        notes=(),
        converted=False,
    )


def printed(found: Inspection, columns: int = 100, *, colors: bool = False) -> str:
    """What a terminal of so many columns shows."""
    out = Console(
        file=io.StringIO(),
        width=columns,
        force_terminal=colors,
        color_system="standard" if colors else None,
        markup=False,
        highlight=False,
    )
    for part in text(View(found), columns):
        out.print(part)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    return str(shown)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.3.ffn"], "layers.3.ffn"),
        (["layers.0.ffn", "layers.1.ffn"], "layers.0..1.ffn (2)"),
        (["model.layers.3.mlp", "model.layers.60.mlp"], "model.layers.3..60.mlp (2)"),
        (["a.0.b", "c.1.b"], "a.0.b .. c.1.b (2)"),
        (["a.0.b", "a.0.b.c"], "a.0.b .. a.0.b.c (2)"),
    ],
)
def test_runs_of_layers_are_named_once(names: list[str], expected: str) -> None:
    assert span(names) == expected


def test_targets_with_one_answer_share_a_row() -> None:
    native = sections(inspection(Model(hidden=5120, width=2304, config={"model_type": "deepseek_v41"})))[0]
    assert [r.label for r in native.rows] == [
        "vllm-0.30",
        FROM_031,
        "sglang-0.5.21",
        "sglang-0.5.22",
        "sglang-0.5.23",
        "tensorrt-llm",
    ]
    assert native.silent == {"no path for this model": ["vllm-0.29", "sglang-0.5.20"]}


def test_named_targets_are_listed_even_without_a_path() -> None:
    native = sections(inspection(Model(config={"model_type": "deepseek_v41"})), everything=True)[0]
    assert [a.name for r in native.rows for a in r.answers][:3] == ["megamoe-512", "megamoe-128", "vllm-0.29"]
    assert native.silent == {}


def test_layers_that_look_alike_are_folded_and_others_are_not() -> None:
    rows = layer_rows(Model(layers=5, mtp=2, mtp_shared="bf16").subject().description)
    assert [(r.name, r.shared) for r in rows] == [
        ("layers.0..4.ffn (5)", "shared FP8 32x32 E8M0, 256 wide"),
        ("mtp.0..1.ffn (2)", "shared BF16, 256 wide"),
    ]
    none = layer_rows(Model(shared="", layers=1, mtp=0).subject().description)
    assert none[0].shared == "no shared expert"


def test_reasons_are_numbered_once() -> None:
    view = View(inspection(Model(hidden=4096, width=2048, shared="bf16")))
    assert len({(r.code, r.message) for r in view.reasons}) == len(view.reasons)
    assert view.numbers(view.rows[0]) == "1"
    shown = {int(n) for row in view.rows for n in view.numbers(row).split(", ") if n}
    assert shown == set(range(1, len(view.reasons) + 1))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_strips_fit_and_a_long_model_shows_its_worst(width: int) -> None:
    out = printed(inspection(Model(width=512, layers=90, mtp=1, mtp_shared="bf16")), width)
    row = next(line for line in out.splitlines() if f"vllm-0.29..{NEWEST.release.rpartition(chr(46))[2]} " in line)
    assert max(map(len, out.splitlines())) <= width
    assert row.rstrip().endswith("█ ░  mixed 90/91 1")
    assert ("a cell stands for up to" in out) == (width < 140)


def test_colours_are_for_terminals() -> None:
    assert "\x1b[32m" in printed(inspection(Model()), colors=True)
    assert "\x1b[" not in printed(inspection(Model()))


def test_costs_name_what_is_held_twice_only_where_it_is() -> None:
    rows = cost_rows(inspection(Model(hidden=512, width=384), Serving(tp=4, ep=2)))
    assert [r.what for r in rows][:3] == [
        "experts as stored",
        "shared experts in the kernel, decoder layers",
        "padding 384 to 512 (megamoe-512)",
    ]
    assert "sharded over TP 4" in rows[1].remark
    plain = cost_rows(inspection(Model(routed="bf16", shared="bf16", width=512)))
    assert not any("SGLang" in r.what for r in plain)


def test_sizes() -> None:
    assert gib(2**30) == "1.00 GiB"
    assert gib(900 * 2**20) == "0.88 GiB"
    assert gib(2**20) == "1.0 MiB"
    assert gib(0) == "0 B"


def test_equal_problems_in_many_places_are_said_once() -> None:
    many = [Problem("a", "m", f"layers.{i}", "h") for i in range(3)] + [Problem("b", "m", "x")]
    assert folded(many) == (Problem("a", "m", "layers.0; the same in 2 more places", "h"), Problem("b", "m", "x"))


def test_commands_of_github_actions_are_escaped() -> None:
    found = inspection(Model(), problems=(Problem("co,de:", "50% \n::error::", "a\rb"),))
    assert workflow_commands(found, ())[0] == "::error title=co%2Cde%3A::a%0Db: 50%25 %0A::error::"


def test_markdown_escapes_what_would_break_a_table() -> None:
    found = inspection(Model(config={"model_type": "deepseek_v4", "a|b": 1}), problems=(Problem("c", "x|y\nz<b>"),))
    assert "- `c` x\\|y z&lt;b>\n" in markdown(View(found))


def test_a_line_break_in_a_name_starts_no_line() -> None:
    assert "\n::error" not in printed(inspection(Model(config={"model_type": "deepseek_v4\n::error::x"})))


def test_a_mixed_row_says_how_many() -> None:
    subject = Model(mtp_shared="bf16").subject()
    answer = next(a for a in judge(subject) if a.name == "vllm-0.33")
    assert Row((answer,), subject.description.layers).word == "mixed 2/3"
    assert answer.layers == (FUSED, FUSED, Verdict(Outcome.UNFUSED, answer.model.reasons))
    assert isinstance(answer.model.reasons[0], Reason)
