"""How an inspection is put into words: labels, folded layers, footnotes, strips that fit, escapes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fse_convert.errors import Problem, folded, size
from fse_convert.inspection import Inspection
from fse_convert.plan.advice import advise
from fse_convert.plan.costs import Serving, costs
from fse_convert.plan.decide import decider
from fse_convert.plan.source import describe_source
from fse_convert.plan.width_rounding import contract_widths
from fse_convert.report.console import span
from fse_convert.report.inspection.costs import cost_rows
from fse_convert.report.inspection.pages import annotation, markdown
from fse_convert.report.inspection.text import text
from fse_convert.report.inspection.view import View, layer_rows
from fse_convert.servers.judge import Subject, judge
from fse_convert.servers.verdict import Outcome, Reason, Verdict
from fse_convert.testing.memory import Model, checkpoint
from fse_convert.testing.patch import edit_config
from tests.releases import FROM_031, LAST, SGLANG, from_release

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def inspection(model: Model, serving: Serving | None = None, problems: tuple[Problem, ...] = ()) -> Inspection:
    about: Subject = model.subject()
    answers = judge(about)
    widths = contract_widths(about, 1)
    opened = checkpoint(about.config, model.tensors())
    return Inspection(
        checkpoint=opened,
        subject=about,
        answers=answers,
        costs=costs(about.description, serving or Serving(), widths),
        advice=advise(about, answers, decider(describe_source(opened))),
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
    native = View(inspection(Model(hidden=5120, width=2304, config={"model_type": "deepseek_v41"}))).sections[0]
    assert [r.label for r in native.rows] == [
        "vllm-0.30",
        FROM_031,
        "sglang-0.5.21",
        "sglang-0.5.22",
        from_release("sglang-0.5.23", SGLANG),
        "tensorrt-llm",
    ]
    assert native.silent == {"refused, no path for this model": ["vllm-0.29", "sglang-0.5.20"]}


def test_named_targets_are_listed_even_without_a_path() -> None:
    native = View(inspection(Model(config={"model_type": "deepseek_v41"})), ["vllm-0.29"]).sections[0]
    assert [name for r in native.rows for name in r.names][:3] == ["megamoe-512", "megamoe-128", "vllm-0.29"]
    assert native.silent == {}


def test_layers_that_look_alike_are_folded_and_others_are_not() -> None:
    rows = layer_rows(Model(layers=5, mtp=2, mtp_shared="bf16").subject().description)
    assert [(r.name, r.shared) for r in rows] == [
        ("layers.0..4.ffn (5)", "FP8 32x32 E8M0, 256 wide"),
        ("mtp.0..1.ffn (2)", "BF16, 256 wide"),
    ]
    none = layer_rows(Model(shared="", layers=1, mtp=0).subject().description)
    assert none[0].shared == "none"


def test_reasons_are_numbered_once() -> None:
    view = View(inspection(Model(hidden=4096, width=2048, shared="bf16")))
    assert len(set(view.reasons)) == len(view.reasons)
    assert view.rows[0].numbers == "1"
    shown = {int(n) for row in view.rows for n in row.numbers.split(", ") if n}
    assert shown == set(range(1, len(view.reasons) + 1))


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_strips_fit_and_a_long_model_shows_its_worst(width: int) -> None:
    out = printed(inspection(Model(width=512, layers=90, mtp=1, mtp_shared="bf16")), width)
    row = next(line for line in out.splitlines() if f"vllm-0.29..{LAST} " in line)
    assert max(map(len, out.splitlines())) <= width
    assert row.rstrip().endswith("█ ░  mixed 90/91 1")
    assert ("a mark stands for up to" in " ".join(out.split())) == (width < 140)


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


def test_no_figure_per_rank_where_ranks_cannot_share_the_experts_evenly() -> None:
    found = inspection(Model(hidden=512, width=384, experts=3), Serving(ep=2))
    view = View(found)
    ranks = {r.what: r.rank for r in view.costs}
    assert ranks["experts as stored"] == ranks["padding 384 to 512 (megamoe-512)"] == ""
    assert ranks["shared experts in the kernel, decoder layers"] != ""
    assert view.advised_cost.startswith("(+")
    assert "per rank" not in view.advised_cost
    assert view.cost_note == "EP 2 does not divide 3 routed experts: no figures per rank of them"
    even = View(inspection(Model(hidden=512, width=384, experts=4), Serving(ep=2)))
    assert all(r.rank for r in even.costs)
    assert (even.cost_note, even.advised_cost.endswith("per rank at EP 2)")) == ("", True)


def test_no_cost_is_shown_of_a_fusion_that_no_server_runs() -> None:
    """No server has MegaMoE for GLM, so neither a kernel's copy nor padding costs anything."""
    rows = cost_rows(inspection(Model(width=384, config={"model_type": "deepseek_v3", "architectures": []})))
    assert [r.what for r in rows] == ["experts as stored"]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**20 - 1, "1.0 MiB"),
        (900 * 2**20, "900.0 MiB"),
        (2**30, "1.00 GiB"),
        (3233.03 * 2**30, "3.16 TiB"),
        (5000 * 2**40, "5,000.00 TiB"),
    ],
)
def test_sizes(n: float, expected: str) -> None:
    assert size(n) == expected


def test_equal_problems_in_many_places_are_said_once() -> None:
    many = [Problem("a", "m", f"layers.{i}", "h") for i in range(3)] + [Problem("b", "m", "x")]
    assert folded(many) == (Problem("a", "m", "layers.0; the same in 2 more places", "h"), Problem("b", "m", "x"))


def test_commands_of_github_actions_are_escaped() -> None:
    found = inspection(Model(), problems=(Problem("co,de:", "50% \n::error::", "a\rb"),))
    assert annotation(View(found).complaints[0]) == "::error title=co%2Cde%3A::a%0Db: 50%25 %0A::error::"


def test_markdown_escapes_what_would_break_a_table() -> None:
    found = inspection(Model(config={"model_type": "deepseek_v4", "a|b": 1}), problems=(Problem("c", "x|y\nz<b>"),))
    assert "- `c` x\\|y z&lt;b>\n" in markdown(View(found))


def test_a_line_break_in_a_name_starts_no_line() -> None:
    assert "\n::error" not in printed(inspection(Model(config={"model_type": "deepseek_v4\n::error::x"})))


def test_a_mixed_row_says_how_many() -> None:
    view = View(inspection(Model(mtp_shared="bf16")), ["vllm-0.33"], ["vllm-0.33"])
    row = next(r for r in view.rows if "vllm-0.33" in r.names)
    assert (row.word, row.outcome, row.strip) == ("mixed 2/3", Outcome.UNFUSED, "2 of 3 layers fused, not: mtp.0.ffn")
    assert view.required[0].word == row.word


def test_a_row_names_all_its_releases_and_a_hint_one_that_works() -> None:
    """Where only the release differs, a reason is said once, of them all; a hint may be a command, so it names one."""
    found = inspection(Model())
    answers = []
    for a in found.answers:
        reason = Reason("why", f"{a.engine} {a.release} would not", hint=f"convert with --target {a.name}")
        answers.append(replace(a, layers=(), model=Verdict(Outcome.UNFUSED, (reason,))))
    dense = inspection(Model(layers=0, mtp=0))
    view = View(replace(dense, answers=tuple(answers)), [a.name for a in answers])
    row = next(r for r in view.rows if "vllm-0.30" in r.names)
    assert row.label == f"vllm-0.29..{LAST}"
    assert row.reasons[0].message == f"vLLM 0.29..{LAST} would not"
    assert row.reasons[0].hint == "convert with --target vllm-0.29"
    assert [r.names for r in view.rows[:2]] == [("megamoe-512",), ("megamoe-128",)]


@pytest.mark.parametrize("form", ["text", "markdown", "github", "json"])
@pytest.mark.parametrize("fault", ["unknown family", "unreadable config", "contradiction", "missing shard"])
def test_no_form_says_yes_to_what_is_not_understood(fault: str, form: str, source: Made, run: Run, tmp_path: Path) -> None:
    """Neither a yes nor a no."""
    root = source()
    if fault == "unknown family":
        edit_config(root, lambda config: config.update(model_type="newcomer", text_config={"model_type": "newcomer"}))
    elif fault == "unreadable config":
        (root / "config.json").write_text("{")
    elif fault == "contradiction":
        edit_config(root, lambda config: config["quantization_config"].update(weight_block_size=[128, 128]))
    else:
        sorted(root.glob("*.safetensors"))[-1].unlink()
    plain = run("inspect", root, "--format", form, "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert plain[0] == {"unknown family": 0}.get(fault, 3)
    code, out, err = run("inspect", root, "--format", form, "--require", "vllm-0.33")
    assert code == {"unknown family": 1}.get(fault, 3)
    for shown in (plain[1], out, page):
        assert not re.search(r"█|:white_check_mark:|class=\"fused\"|mark fused|\bPassed\b|\"verdict\": \"fused\"", shown)
        assert "no-moe-layers" not in shown
    if form == "json":
        found = json.loads(plain[1])["targets"]
        assert "unknown" in {t["verdict"] for t in found}
        assert all(t["reasons"] for t in found)
        assert {t["verdict"] for t in found} <= {"unknown", "unfused", "refused", "unsafe"}
    assert "error[not-fused]: vllm-0.33 " in err
