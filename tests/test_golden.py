"""What 0.1.0 wrote and answered, by digest: outputs byte for byte, the keys of every JSON object, and every verdict.

``python tests/test_golden.py`` writes ``golden.json`` again. Do that only for a change of bytes, keys or verdicts that is wanted.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.checkpoints import make_checkpoint

GOLDEN = Path(__file__).with_name("golden.json")
SMALL = {"hidden": 512, "width": 384, "layers": 2, "experts": 3, "vocab": 64}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("v4-flash", "v4-flash-0731", "v4-pro", "v4-flash-base", "v4.1-flash", "v3")},
    **{kind: (kind, {}) for kind in ("quark-mxfp4", "nvfp4", "bf16")},
    "v4.1 single file": ("v4.1-flash", {"single_file": True}),
    "v4.1 small shards": ("v4.1-flash", {"shard_size": "1MiB"}),
    "v4.1 two shared": ("v4.1-flash", {"shared": 2}),
    "v4.1 no metadata": ("v4.1-flash", {"header_metadata": False}),
    "v4.1 partial block": ("v4.1-flash", {"width": 400}),
    "v4.1 wide": ("v4.1-flash", {"width": 512}),
    "v3 powers of two": ("v3", {"power_of_two": True}),
    "v3 any scale": ("v3", {"power_of_two": False}),
}
"""Kind and knobs of the factory, by the name of a case."""
OPTIONS: dict[str, list[str]] = {
    "numerics": [],
    "strict 128": ["--target", "megamoe-128", "--verify", "storage"],
    "unfused": ["--allow-unfused", "--verify", "storage"],
    "unproved": ["--allow-unfused", "--verify", "none"],
    "shared": ["--experts", "shared", "--allow-unfused", "--verify", "storage"],
    "tp 4": ["--target", "megamoe-512", "--tp", "4", "--allow-unfused", "--verify", "storage"],
    "tp 3 at 128": ["--tp", "3", "--target", "megamoe-128", "--allow-unfused", "--verify", "storage"],
    "vllm-0.30": ["--target", "vllm-0.30", "--allow-unfused", "--verify", "storage"],
    "vllm-0.33": ["--target", "vllm-0.33", "--allow-unfused", "--verify", "storage"],
    "sglang-0.5.21": ["--target", "sglang-0.5.21", "--allow-unfused", "--verify", "storage"],
    "hard links": ["--link", "hard", "--allow-unfused", "--verify", "storage", "--workers", "1"],
}


def command(*args: object) -> tuple[int, dict[str, Any]]:
    """Run the command line with ``--json``: exit code, and the object."""
    from fse_convert.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as stopped:
        main([*map(str, args), "--json"])
    return int(stopped.value.code or 0), json.loads(out.getvalue())


def sha(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def tree(folder: Path) -> dict[str, str]:
    """SHA-256 by name of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def shape(value: Any) -> Any:
    """Keys and types of a JSON value in order; of a list the distinct ones of its elements, of an object of names only the type."""
    if isinstance(value, dict):
        named = all("." in key or key in ("unchanged", "padded", "kernel") or " " in key for key in value)
        return "names" if value and named else {key: shape(v) for key, v in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        found += [s for s in map(shape, value) if s not in found]
        return sorted({json.dumps(s) for s in found})
    return type(value).__name__


def verdicts(inspection: dict[str, Any]) -> dict[str, str]:
    """What an inspection says of each target, without its words: outcomes, layers and codes, in short digests."""

    def codes(reasons: list[dict[str, Any]]) -> list[Any]:
        return [[r["code"], r.get("layers")] for r in reasons]

    said = {t["target"]: [t["verdict"], t["layers"], codes(t["reasons"]), codes(t["notes"])] for t in inspection["targets"]}
    return {name: f"{value[0]} {sha(value)[:8]}" for name, value in said.items()}


def inspected(source: Path) -> dict[str, Any]:
    code, answer = command("inspect", source)
    codes = {part: [p["code"] for p in answer[part]] for part in ("problems", "unsupported", "conflicts", "notes")}
    return {"exit": code, "json": sha(shape(answer)), "verdicts": verdicts(answer), "codes": codes}


def converted(source: Path, out: Path, options: list[str]) -> dict[str, Any]:
    code, planned = command(source, out, *options, "--dry-run")
    if code:
        return {"exit": code, "codes": sorted(p["code"] for p in planned["problems"])}
    code, answer = command(source, out, *options)
    assert code == 0, answer
    checked, proof = command("verify", out, "--source", source)
    alone, stated = command("verify", out)
    parts = {"dry run": planned, "convert": answer, "verify": proof, "verify alone": stated}
    return {
        "exit": [code, checked, alone],
        "files": len(answer["files"]),
        "output": sha(tree(out)),
        "manifest": tree(out)["fse/manifest.json"],
        "notes": [n["code"] for n in planned["notes"]],
        "json": {name: sha(shape(part)) for name, part in parts.items()},
    }


@pytest.mark.parametrize("name", SOURCES)
def test_inspections_are_those_of_0_1_0(name: str, made: Callable[..., Path]) -> None:
    kind, knobs = SOURCES[name]
    found, golden = inspected(made(kind, **knobs)), json.loads(GOLDEN.read_text())[name]["inspect"]
    found["verdicts"] = {target: found["verdicts"][target] for target in golden["verdicts"]}  # releases may be added
    assert found == golden


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SOURCES)
def test_outputs_are_those_of_0_1_0(name: str, options: str, made: Callable[..., Path], tmp_path: Path) -> None:
    kind, knobs = SOURCES[name]
    source = made(kind, **knobs)
    assert converted(source, tmp_path / "out", OPTIONS[options]) == json.loads(GOLDEN.read_text())[name][options]
    if (tmp_path / "out").exists():
        code, restored = command("restore", tmp_path / "out", tmp_path / "original")
        assert code == 0, restored
        assert tree(tmp_path / "original") == tree(source)


def record() -> None:
    """Write ``golden.json`` from what this version does."""
    golden: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, knobs) in SOURCES.items():
            extra = {"engram_rows": 64} if kind == "v4.1-flash" else {}
            source = make_checkpoint(Path(folder, name), kind, **{**SMALL, **extra, **knobs})
            golden[name] = {"inspect": inspected(source)}
            for option, arguments in OPTIONS.items():
                golden[name][option] = converted(source, Path(folder, f"{name} {option}"), arguments)
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    record()
