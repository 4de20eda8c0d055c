"""Pages that come from the program say what it says; `make docs` makes them."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from fse_convert.model.families.find import FAMILIES
from fse_convert.report.schemas import RESPONSES, schema
from fse_convert.servers.targets import TARGETS

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = DOCS.parent / "README.md"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(svg: str) -> list[str]:
    """The text of a picture by line, whatever the release of rich that made it."""
    found: dict[str, str] = {}
    for attributes, text in re.findall(r"<text([^>]*)>([^<]*)</text>", svg):
        line = re.search(r"line-(\d+)", attributes)
        if line:
            found[line[1]] = found.get(line[1], "") + html.unescape(text)
    return [re.sub(r"\s+", " ", found[n]).strip() for n in sorted(found, key=int)]


def test_the_page_of_targets_is_the_data(make: ModuleType) -> None:
    page = (DOCS / "targets.md").read_text(encoding="utf-8")
    assert page == make.targets_markdown()
    assert all(f"`{t.name}`" in page for t in TARGETS)


def test_the_page_of_families_is_the_data(make: ModuleType) -> None:
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    assert page == make.families_markdown()
    assert all(f"`{t}`" in page for family in FAMILIES for t in family.model_types)


@pytest.mark.parametrize("name", ["gpt-oss", "Granite-MoE", "Aria", "Llama 4", "Qwen3-VL-MoE"])
def test_the_page_of_families_names_single_experts_only_where_releases_have_them(name: str) -> None:
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in (DOCS / "families.md").read_text(encoding="utf-8").splitlines()
    }
    assert "experts.E." not in rows[name]
    assert "of all experts `model.layers.N." in rows[name]
    assert "experts.E.{gate_proj,up_proj,down_proj}`, or of all experts `{experts.gate_up_proj" in rows["Qwen3.5"]


def test_the_page_of_codes_is_the_data(make: ModuleType) -> None:
    assert (DOCS / "codes.md").read_text(encoding="utf-8") == make.codes_markdown()


def test_the_schemas_are_those_of_the_program() -> None:
    written = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "schema").iterdir()}
    assert written == {command: f"{schema(command)}\n" for command in RESPONSES}


def test_the_picture_of_inspect_is_a_real_run(make: ModuleType, tmp_path: Path) -> None:
    shown = lines((DOCS / "inspect.svg").read_text(encoding="utf-8"))
    assert "NVIDIA MegaMoE: vLLM >= 0.31 and SGLang >= 0.5.23 fuse this checkpoint as is." in shown
    assert shown == lines(make.screen(make.example(tmp_path)))
    assert "docs/inspect.svg" in README.read_text(encoding="utf-8")


def test_a_picture_fetches_nothing() -> None:
    assert not re.findall(r"url\(|href=", re.sub(r"url\(#[^)]*\)", "", (DOCS / "inspect.svg").read_text(encoding="utf-8")))


PAGES = sorted(str(p.relative_to(DOCS.parent)) for place in ("*.md", "docs/*.md", "examples/*.md") for p in DOCS.parent.glob(place))


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page: str) -> None:
    path = DOCS.parent / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_every_option_of_convert_is_described() -> None:
    from fse_convert.cli import cli

    text = (DOCS / "converting.md").read_text(encoding="utf-8")
    for option in cli.commands["convert"].params:
        assert option.param_type_name == "argument" or any(f"`{name}" in text or f", `{name}" in text for name in option.opts), (
            option
        )


def test_the_readme_leads_to_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert all(f"(docs/{page.name})" in text for page in DOCS.glob("*.md"))
    assert len(text.splitlines()) < 100


def test_every_exit_code_is_described_and_in_the_help() -> None:
    from fse_convert.exit_codes import HELP, ExitCode

    text = (DOCS / "converting.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"| {int(code)} |" in text
        assert f"\n  {int(code)}  " in HELP
