"""What a conversion says of its target is what `inspect` says of the output: for every target, and for both ways of padding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.servers.targets import TARGETS

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
SERVERS = [t.name for t in TARGETS if not t.is_contract]
CONTRACTS = [t.name for t in TARGETS if t.is_contract]


def conversion(run: Run, source: Path, out: Path, target: str, *options: str) -> dict[str, Any]:
    code, text, err = run(source, out, "--target", target, "--verify", "none", "--json", *options)
    assert code == 0, err
    found: dict[str, Any] = json.loads(text)
    return found


def inspected(run: Run, out: Path, target: str) -> dict[str, Any]:
    code, text, _ = run("inspect", out, "--json", "--target", target)
    assert code == 0
    found: dict[str, Any] = json.loads(text)["targets"][0]
    return found


def by_layer(answer: dict[str, Any]) -> dict[str, str]:
    return {name: outcome for outcome, names in answer["layers"].items() for name in names}


@pytest.mark.parametrize("experts", ["all", "shared"])
@pytest.mark.parametrize("target", [t.name for t in TARGETS])
def test_the_stated_verdict_is_that_of_the_output(target: str, experts: str, made: Made, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    plan = conversion(run, made(layers=1), out, target, "--experts", experts, "--allow-unfused")
    answer = inspected(run, out, target)
    assert {v["name"]: v["server"] for v in plan["layers"]} == by_layer(answer)
    assert {v["verdict"] for v in plan["layers"]} == {"fused"}
    stated = json.loads((out / "fse/manifest.json").read_text())["server"]
    if target in CONTRACTS:
        assert plan["server"] is stated is None
        return
    assert plan["server"]["verdict"] == stated["verdict"] == answer["verdict"]
    assert plan["server"]["fused"] == answer["fused"]
    assert {r["code"] for r in plan["server"]["reasons"]} == {r["code"] for r in answer["reasons"]}
    assert stated["layers"] == by_layer(answer)


@pytest.mark.parametrize("target", [*SERVERS, *CONTRACTS])
def test_unfused_formats_agree_too(target: str, made: Made, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    plan = conversion(run, made("nvfp4", layers=1, mtp=0), out, target, "--allow-unfused")
    assert {v["name"]: v["server"] for v in plan["layers"]} == by_layer(inspected(run, out, target))


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("megamoe-512", "2 of 2 layers fit megamoe-512\n"),
        ("sglang-0.5.21", "2 of 2 layers fit megamoe-512; SGLang 0.5.21 runs MegaMoE, with the shared expert beside it"),
        (
            "tensorrt-llm",
            "2 of 2 layers fit megamoe-512; TensorRT-LLM main (2026-08) runs MegaMoE, with the shared expert beside it",
        ),
        ("vllm-0.30", "2 of 2 layers fit megamoe-512; vLLM 0.30 fuses 2 of 2\n"),
        ("vllm-0.29", "2 of 2 layers fit megamoe-512; vLLM 0.29 refuses MegaMoE (model-unsupported)"),
        ("sglang-0.5.22", "2 of 2 layers fit megamoe-128; SGLang 0.5.22 fuses 0 of 2 (scale-block)"),
    ],
)
def test_the_headline_keeps_contract_and_server_apart(
    target: str, sentence: str, made: Made, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, text, err = run(made(layers=1), tmp_path / "out", "--target", target, "--dry-run", "--allow-unfused")
    assert code == 0
    assert sentence in text
    assert ("note[server-refuses]" in err) == (target == "vllm-0.29")


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--part", "1/2"]], ids=["convert", "dry run", "part"])
@pytest.mark.parametrize("target", ["vllm-0.29", "vllm==0.29.1", "sglang-0.5.20"])
def test_a_named_server_that_refuses_is_a_refusal(target: str, more: list[str], made: Made, tmp_path: Path, run: Run) -> None:
    code, _, err = run(made(layers=1), tmp_path / "out", "--target", target, *more)
    assert code == 1
    assert "error[server-refuses]" in err
    assert "--allow-unfused" in err
    assert not list(tmp_path.iterdir())


def test_padding_the_sidecar_alone_fuses_on_no_server_by_itself(made: Made, tmp_path: Path, run: Run) -> None:
    code, text, err = run(made(layers=1), tmp_path / "out", "--target", "vllm-0.30", "--experts", "shared", "--dry-run")
    assert code == 0
    assert "vLLM 0.30 fuses 0 of 2 (width-ratio)" in text
    assert "note[sidecar-only]" in err
    assert "fse_convert.serving" in err


@pytest.mark.parametrize("target", SERVERS)
def test_nvfp4_gets_a_width_that_the_server_takes(target: str, made: Made, tmp_path: Path, run: Run) -> None:
    _, text, _ = run(made("nvfp4", layers=1, mtp=0), tmp_path / "out", "--target", target, "--allow-unfused", "--dry-run", "--json")
    plan = json.loads(text)
    wide = {"sglang-0.5.22": 512, "sglang-0.5.23": 512, "vllm-0.33": 384, "sglang-0.5.20": 384}.get(target)
    assert wide is None or plan["width"]["main"] == wide
    assert "width-alignment" not in {r["code"] for r in plan["server"]["reasons"]}
