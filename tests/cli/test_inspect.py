"""`fse-convert inspect` as users and CI jobs run it: exit codes, forms of output, broken checkpoints, imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fse_convert
from fse_convert.errors import UsageError
from fse_convert.exit_codes import ExitCode
from fse_convert.testing.patch import edit_config, edit_index, read_shard, write_shard
from tests.releases import FROM_031, SGLANG

Run = Callable[..., tuple[int, str, str]]
Made = Callable[..., Path]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def v41(made: Made) -> Path:
    """V4.1's own widths, few layers."""
    return made(hidden=5120, width=2304, layers=3, experts=2, mtp=2, sparse=True)


@pytest.fixture(scope="session")
def v41_padded(made: Made) -> Path:
    return made(hidden=5120, width=2560, layers=3, experts=2, mtp=2, sparse=True)


def test_the_first_lines_answer_the_question(run: Run, v41: Path) -> None:
    code, out, err = run("inspect", v41, "-q")
    assert (code, err) == (ExitCode.OK, "")
    lines = out.splitlines()
    assert lines[0].startswith("DeepSeek-V4.1 (deepseek_v41), ")
    assert "layers.0..2.ffn (3)  2 x MXFP4, 2304 wide  shared: FP8 32x32 E8M0" in lines[1]
    assert "NVIDIA MegaMoE: vLLM >= 0.31 and SGLang >= 0.5.23 fuse this checkpoint as is." in lines[3:6]
    assert max(len(line) for line in lines if not line.startswith("  fse-convert ")) <= 100
    assert len(lines[: next(i for i, line in enumerate(lines) if line.startswith("AITER FSE"))]) <= 31
    assert len(lines) <= 62 + len(SGLANG)


def test_a_strip_has_a_cell_per_layer_and_the_drafter_apart(run: Run, v41: Path) -> None:
    _, out, _ = run("inspect", v41)
    strips = dict(re.findall(r"^  (\S+) +([█░x!?#-]{3} [█░x!?#-]{2})  ", out, re.MULTILINE))
    assert strips[FROM_031] == "███ ██"
    assert strips["vllm-0.30"] == "░░░ ░░"
    assert strips["sglang-0.5.21"] == "xxx xx"
    assert "no path for this model: vllm-0.29, sglang-0.5.20" in out
    assert "  1 width-ratio: shared width 2304 is no multiple of the routed width 2560" in out


def test_a_mixed_model_is_seen_at_a_glance(run: Run, made: Made) -> None:
    _, out, _ = run("inspect", made("quark-mxfp4", layers=4, mtp=1))
    assert re.search(re.escape(f"{FROM_031}-aiter") + r" +████ ░  mixed 4/5", out)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_cells_are_ascii_where_the_terminal_is(v41: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    out = subprocess.run(
        [sys.executable, "-m", "fse_convert", "inspect", v41], capture_output=True, env=environment, check=True
    ).stdout
    assert ("### ##" in out.decode(encoding)) == (encoding == "ascii")
    assert b"\x1b[" not in out


@pytest.mark.parametrize(
    ("required", "code"),
    [
        (("vllm-0.33",), ExitCode.OK),
        (("vllm-0.33", "sglang-0.5.23"), ExitCode.OK),
        (("vllm-0.33", "vllm-0.30"), ExitCode.NO),
        (("vllm-0.33-aiter",), ExitCode.NO),
        (("megamoe-128",), ExitCode.OK),
        (("atom",), ExitCode.NO),
    ],
)
def test_required_targets_decide_the_exit_code_and_say_why(run: Run, v41: Path, required: tuple[str, ...], code: ExitCode) -> None:
    options = [part for name in required for part in ("--require", name)]
    got, _, err = run("inspect", v41, *options)
    assert got == code
    assert ("error[not-fused]: " in err) == (code is ExitCode.NO)
    if "vllm-0.30" in required:
        assert "vllm-0.30 does not fuse: width-ratio: shared width 2304 is" in err


def test_a_padded_checkpoint_passes_where_the_source_did_not(run: Run, v41_padded: Path) -> None:
    code, out, _ = run("inspect", v41_padded, "--require", "vllm-0.30")
    assert code == ExitCode.OK
    assert "vLLM >= 0.30 and SGLang >= 0.5.23 fuse this checkpoint as is." in out


def test_the_output_of_a_conversion_can_be_inspected(run: Run, made: Made, tmp_path: Path) -> None:
    source = made(width=384)
    assert run("inspect", source, "--require", "megamoe-512")[0] == ExitCode.NO
    assert run(source, tmp_path / "out", "--target", "megamoe-512")[0] == ExitCode.OK
    code, out, _ = run("inspect", tmp_path / "out", "--require", "megamoe-512")
    assert code == ExitCode.OK
    assert "converted by fse-convert" in out.splitlines()[0]


def test_targets_can_be_named(run: Run, v41: Path) -> None:
    _, out, _ = run("inspect", v41, "--target", "vllm-0.29", "--target", "megamoe-512", "--require", "vllm-0.31")
    assert re.findall(r"^  (vllm\S*|megamoe\S*|sglang\S*|atom) ", out, re.MULTILINE) == ["megamoe-512", "vllm-0.29", "vllm-0.31"]
    assert "vLLM >= 0.31 and SGLang >= 0.5.23 fuse this checkpoint as is." in out


def test_a_mistyped_target_is_a_usage_error(run: Run, v41: Path) -> None:
    for option in ("--target", "--require"):
        code, _, err = run("inspect", v41, option, "vlm-0.33")
        assert code == ExitCode.USAGE
        assert "did you mean vllm-0.33?" in err
        assert f"where: {option}" in err


def _json(run: Run, *args: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run("inspect", *args)
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_json_is_one_object_with_every_target_and_figure(run: Run, v41: Path) -> None:
    code, found = _json(run, v41, "--json", "--ep", 4, "--tp", 2)
    assert code == ExitCode.OK
    assert (found["schema_version"], found["ok"], found["exit_code"]) == (1, True, 0)
    assert [d["name"] for d in found["layers"]] == [f"layers.{i}.ffn" for i in range(3)] + ["mtp.0.ffn", "mtp.1.ffn"]
    targets = {t["target"]: t for t in found["targets"]}
    assert {t["question"] for t in targets.values()} == {"native-megamoe", "aiter-fse", "slots"}
    vllm = targets["vllm-0.30"]
    assert vllm["verdict"] == "unfused"
    assert list(vllm["layers"]) == ["unfused"]
    assert [(r["code"], len(r["layers"])) for r in vllm["reasons"]] == [("width-ratio", 5)]
    assert targets["vllm-0.33"]["reasons"] == []
    assert found["costs"]["serving"] == {"tp": 2, "ep": 4}
    shared = found["costs"]["shared_per_rank"]
    assert shared["twice"] == 2 * shared["once"] == 4 * shared["sharded"]
    assert found["costs"]["padding"]["megamoe-512"]["new_width"] == 2560
    assert found["advice"]["command"] == f"fse-convert {v41} {v41.name}-megamoe-512-tp-2 --target megamoe-512 --tp 2"
    assert found["quantization"]["weight_block_size"] == [32, 32]


def test_json_tells_of_required_targets(run: Run, v41: Path) -> None:
    code, found = _json(run, v41, "--format", "json", "--require", "vllm-0.30", "--require", "vllm-0.33")
    assert code == found["exit_code"] == ExitCode.NO
    assert found["ok"] is False
    assert found["required"] == [
        {"target": "vllm-0.30", "fused": False, "passed": False},
        {"target": "vllm-0.33", "fused": True, "passed": True},
    ]


def test_a_target_that_would_fuse_wrongly_does_not_pass_the_gate(run: Run, v41: Path) -> None:
    """vLLM 0.30 on ROCm says yes by the config, and its DeepSeek-V4.1 loader then finds no place for the shared expert."""
    code, found = _json(run, v41, "--format", "json", "--require", "vllm-0.30-aiter")
    assert code == ExitCode.NO
    assert found["required"] == [{"target": "vllm-0.30-aiter", "fused": False, "passed": False}]


@pytest.mark.parametrize("form", [("--json",), ("--format", "json"), ("--format=json",)])
def test_json_on_failure_too(run: Run, tmp_path: Path, form: tuple[str, ...]) -> None:
    code, out, err = run("inspect", tmp_path / "nothing", *form)
    assert code == ExitCode.INVALID
    assert json.loads(out)["problems"][0]["code"] == "no-such-folder"
    assert "no such folder" in err


def test_markdown_has_tables_that_github_renders(run: Run, v41: Path) -> None:
    code, out, _ = run("inspect", v41, "--format", "markdown", "--require", "vllm-0.33")
    assert code == ExitCode.OK
    assert out.startswith(f"## {v41}\n")
    assert "- :white_check_mark: required: `vllm-0.33`" in out
    assert f"| {FROM_031} | :white_check_mark: fused |  |  |" in out
    assert "| vllm-0.30 | :x: not fused | all | 1 |" in out
    tables = [line for line in out.splitlines() if line.startswith("|")]
    for line in tables:
        assert line.endswith("|")
    assert "1. `width-ratio`: shared width 2304" in out


def test_markdown_names_the_layers_that_differ(run: Run, made: Made) -> None:
    _, out, _ = run("inspect", made("quark-mxfp4", layers=4, mtp=1), "--format", "markdown")
    assert f"| {FROM_031}-aiter | :x: mixed 4/5 | `mtp.0.ffn` | " in out


def test_github_annotations_come_before_the_markdown(run: Run, v41: Path) -> None:
    code, out, _ = run("inspect", v41, "--format", "github", "--require", "vllm-0.30", "--require", "vllm-0.30-aiter")
    assert code == ExitCode.NO
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("## "))
    assert lines[0].startswith("::error title=vllm-0.30 does not fuse::width-ratio: shared width 2304")
    assert any(line.startswith("::error title=vllm-0.30-aiter is unsafe::aiter-slots-unloaded") for line in lines[:first])
    assert not any(line.startswith("::") for line in lines[first:])


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.cells = 0
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.foreign += [f"{tag} {v}" for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        self.foreign += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.cells += tag == "i" and values.get("class") != "gap"
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_file_that_needs_nothing_else(run: Run, v41: Path, tmp_path: Path) -> None:
    code, _, _ = run("inspect", v41, "--html", tmp_path / "report.html", "--target", "vllm-0.30", "--target", "vllm-0.33")
    assert code == ExitCode.OK
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    links = _Links()
    links.feed(page)
    assert links.foreign == []
    assert links.open == []
    assert links.cells == 2 * 5 + 2, "a cell a layer, and the legend"
    assert "url(" not in page
    assert 'title="layers.0.ffn: not fused (width-ratio)"' in page


def test_html_that_cannot_be_written_is_an_environment_error(run: Run, v41: Path, tmp_path: Path) -> None:
    code, _, err = run("inspect", v41, "--html", tmp_path / "missing" / "report.html")
    assert code == ExitCode.ENVIRONMENT
    assert "report.html" in err


def test_names_of_a_checkpoint_cannot_break_a_report(run: Run, source: Made, tmp_path: Path) -> None:
    root = source()
    config = json.loads((root / "config.json").read_text())
    config["model_type"] = "<script>alert(1)</script>|a\n::error::x"
    (root / "config.json").write_text(json.dumps(config))
    _, out, _ = run("inspect", root, "--format", "github", "--html", tmp_path / "r.html", "--require", "vllm-0.33")
    assert "<script" not in (tmp_path / "r.html").read_text()
    assert not any("<script" in line for line in out.splitlines() if not line.startswith("::"))
    assert not any(line.startswith("::error::x") for line in out.splitlines())


def test_all_problems_of_a_broken_checkpoint_in_one_run(run: Run, source: Made) -> None:
    root = source()
    names = sorted(p.name for p in root.glob("*.safetensors"))
    (root / names[0]).write_bytes((root / names[0]).read_bytes()[:-5])
    (root / names[1]).unlink()
    edit_index(root, lambda index: index["weight_map"].update({"ghost.weight": names[2]}))
    edit_config(root, lambda config: config["text_config"].update(n_routed_experts=77))
    code, out, err = run("inspect", root)
    assert code == ExitCode.INVALID
    for problem in ("shard-truncated", "shard-missing", "tensor-missing"):
        assert f"error[{problem}]" in err
    assert "n_routed_experts is 77" in out
    assert "projection-missing" not in err


def rename_all(root: Path, change: Callable[[str], str]) -> None:
    """Rename tensors in every header and in the index."""
    for shard in root.glob("*.safetensors"):
        header, payload = read_shard(shard)
        write_shard(shard, {change(name): entry for name, entry in header.items()}, payload)
    edit_index(root, lambda i: i.update(weight_map={change(name): shard for name, shard in i["weight_map"].items()}))


def test_problems_of_files_and_of_layers_are_shown_together(run: Run, source: Made) -> None:
    root = source(layers=4)
    rename_all(root, lambda name: name.replace("shared_experts.w3.scale", "shared_experts.w9.scale"))
    lost = json.loads((root / "model.safetensors.index.json").read_text())["weight_map"]["layers.2.ffn.shared_experts.w1.scale"]
    (root / lost).unlink()
    (root / "stray.safetensors").write_bytes(b"\0" * 3)
    code, out, err = run("inspect", root)
    assert code == ExitCode.INVALID
    assert f"error[shard-missing]: the index lists this shard, the folder has no such file\n  where: {lost}" in err
    assert "error[shard-unlisted]" in err
    assert "error[scale-missing]" in err
    assert "layers.0.ffn.shared_experts.w3.weight; the same in 3 more places" in err
    assert "layers.2" not in err
    assert "expert-unknown" in out


def test_where_nothing_can_be_read_there_is_no_report(run: Run, tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path)
    assert (code, out) == (ExitCode.INVALID, "")
    assert "error[file-missing]" in err
    assert "error[no-weights]" in err


def test_a_dense_model_has_nothing_to_fuse(run: Run, source: Made) -> None:
    root = source("v3", layers=1, dense=1, mtp=0)
    code, out, _ = run("inspect", root)
    assert code == ExitCode.OK
    assert "no layers with experts under the names of this family" in out
    assert run("inspect", root, "--require", "vllm-0.33-aiter")[0] == ExitCode.NO


@pytest.mark.parametrize("form", ["json", "github", "markdown", "text"])
def test_a_broken_checkpoint_in_every_form(run: Run, source: Made, form: str) -> None:
    root = source()
    next(root.glob("*.safetensors")).unlink()
    code, out, err = run("inspect", root, "--format", form)
    assert code == ExitCode.INVALID
    assert "shard-missing" in err
    assert form != "text" or "Broken, see the errors" in out
    if form == "json":
        found = json.loads(out)
        assert (found["ok"], found["exit_code"], found["problems"][0]["code"]) == (False, 3, "shard-missing")
    elif form == "github":
        assert out.startswith("::error title=shard-missing::")


@pytest.mark.parametrize("form", ["text", "markdown", "github", "json"])
def test_an_unknown_family_is_described_and_not_guessed(run: Run, source: Made, form: str, tmp_path: Path) -> None:
    root = source()
    config = json.loads((root / "config.json").read_text())
    config["model_type"] = "newcomer"
    config["text_config"]["model_type"] = "newcomer_text"
    (root / "config.json").write_text(json.dumps(config))
    code, out, _ = run("inspect", root, "--format", form, "--html", tmp_path / "r.html")
    assert code == ExitCode.OK
    assert "newcomer" in out
    assert "layers.N.ffn.experts.N.w1.weight" in out
    assert "layers.N.ffn.experts.N.w1.weight" in (tmp_path / "r.html").read_text()
    assert run("inspect", root, "--require", "vllm-0.33")[0] == ExitCode.NO


def test_a_contradicting_config_is_refused(run: Run, source: Made) -> None:
    root = source()
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (root / "config.json").write_text(json.dumps(config))
    code, _, err = run("inspect", root)
    assert code == ExitCode.INVALID
    assert "error[config-block]: weight_block_size is [128, 128], experts are stored as FP8 32x32 E8M0" in err
    code, _, err = run(root, root.parent / "out", "--dry-run")
    assert code == ExitCode.INVALID
    assert "error[config-block]" in err


@pytest.mark.parametrize(
    ("args", "used"),
    [
        pytest.param((), {"rich"}, id="text"),
        pytest.param(("--format", "markdown"), {"jinja2"}, id="markdown"),
        pytest.param(("--format", "github"), {"jinja2"}, id="github"),
        pytest.param(("--json",), set(), id="JSON"),
        pytest.param(("--html", "report.html"), {"rich", "jinja2"}, id="HTML"),
    ],
)
def test_nothing_heavy_is_imported_but_what_a_format_needs(
    v41: Path, tmp_path: Path, args: tuple[str, ...], used: set[str]
) -> None:
    script = textwrap.dedent(
        """
        import sys
        from fse_convert.cli import main
        try:
            main(sys.argv[1:])
        except SystemExit as e:
            assert not e.code, e.code
        heavy = {"torch", "numpy", "safetensors", "huggingface_hub", "rich", "jinja2"} & set(sys.modules)
        print(*heavy, file=sys.stderr)
        """
    )
    command = [sys.executable, "-c", script, "inspect", str(v41), "-q", *args]
    done = subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, text=True)
    assert set(done.stderr.split()) == used


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from fse_convert.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    script += (
        "print(sorted({'torch', 'rich', 'jinja2', 'numpy', 'asyncio', 'concurrent.futures'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("kind", "told"), [("v3", True), ("v4-flash-base", False), ("v4-flash", False)])
def test_why_scales_that_are_not_powers_of_two_stay(kind: str, told: bool, made: Callable[..., Path], run: Run) -> None:
    text = " ".join(run("inspect", made(kind))[1].split())
    assert ("F32 scale tensors that were read hold values that are not powers of two and stay as they are" in text) == told
    assert ("note[scales-kept]: " in text) == told


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda fse: edit(fse / "manifest.json", '"from": 384', '"from": 448'), "manifest-damaged"),
        (lambda fse: (fse / "manifest.json").write_text("{"), "manifest-damaged"),
        (lambda fse: next(fse.glob("shared-*")).unlink(), "sidecar-incomplete"),
        (lambda fse: (fse / "model.safetensors.index.json").write_text("[]"), "manifest-invalid"),
    ],
    ids=["manifest edited", "manifest cut", "no shard", "index"],
)
def test_a_damaged_sidecar_is_an_error(damage: Callable[[Path], object], code: str, output: Made, run: Run) -> None:
    out = output()
    assert run("inspect", out, "--require", "megamoe-512")[0] == 0
    damage(out / "fse")
    for gate in ((), ("--require", "megamoe-512")):
        exit_code, text, _ = run("inspect", out, *gate, "--json")
        assert (exit_code, [p["code"] for p in json.loads(text)["problems"]]) == (3, [code])


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_api_answers_for_a_required_target_as_the_command_does(v41: Path, run: Run) -> None:
    """In any spelling; for a target that was not judged, or that does not exist, there is no answer."""
    everything = fse_convert.inspect(v41)
    for name in ("vllm-0.30", "vLLM 0.30", "vllm==0.30.0", "vllm-0.33", "vllm"):
        assert everything.exit_code([name]) == run("inspect", v41, "--require", name)[0], name
    for found, name in ((everything, "typo"), (fse_convert.inspect(v41, targets=["vllm-0.33"]), "vllm-0.30")):
        with pytest.raises(UsageError) as e:
            found.exit_code([name])
        assert e.value.problems[0].code == "target-unknown"
