"""Asks vLLM's own code about AITER shared-expert fusion, in the environment of the newest release."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fse_convert.model.description import LayerDescription
from fse_convert.model.moe import LayerKind
from fse_convert.plan.source import Source
from fse_convert.servers.aiter.question import AiterQuestion, AiterTarget, ask_aiter, judge_layer
from fse_convert.servers.aiter.vllm_config import RELEASES
from tests.peers import wheels
from tests.peers.aiter_cases import CLASSES
from tests.plan.changes.models import letters

DRIVER = Path(__file__).parent / "drivers" / "aiter_driver.py"


def ask_vllm(request: dict[str, Any], python: Path, sources: Path | None = None) -> dict[str, Any]:
    """Run the driver, on the environment's vLLM or on the sources of another release."""
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"} | ({"PYTHONPATH": str(sources)} if sources else {})
    command = [str(python), str(DRIVER)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.rpartition("@@@")[2])
    return answers


class Sources(wheels.Peer):
    """All Python files of a release, kept apart from the few that other tests use."""

    def __str__(self) -> str:
        return f"{super().__str__()}-sources"


def sources_of(release: str) -> Path:
    """Return the folder with the Python files of a release."""
    return wheels.fetch(Sources("vllm", f"{release}.0", ("*.py", "*.json")))


def cases(name: str, source: Source, release: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield a case for every layer, with our letter for the check itself, and for what comes of it."""
    config = source.checkpoint.config
    question = ask_aiter(config, None, source.quantization, AiterTarget("x", RELEASES[release]))
    assert isinstance(question, AiterQuestion)
    (outcome,) = letters(source, (f"vllm-{release}-aiter",))
    for layer, letter in zip(source.description.layers, outcome, strict=True):
        case = {"id": f"{name}: {layer.layer.name}", "config": config, "model_class": CLASSES[question.family.name]}
        case |= {"shared": question.family.shared, **place(question, layer, source)}
        yield case, judge_layer(question, layer).outcome.value[0], letter


def place(question: AiterQuestion, layer: LayerDescription, source: Source) -> dict[str, Any]:
    """Return the module of a layer's experts, and for DeepSeek-V4's drafter how many layers it has."""
    family, index, layers = question.family, layer.layer.index, question.decoder_layers or 0
    if layer.layer.kind is LayerKind.DECODER:
        return {"block": family.block.format(index=index)}
    drafter = sum(d.layer.kind is LayerKind.MTP for d in source.description.layers)
    return {"block": family.mtp_block.format(k=index, next=layers + index), "mtp": drafter if family.v4 else None}


def answer(found: dict[str, Any]) -> str:
    """Return vLLM's answer as a letter."""
    return "e" if "error" in found else "f" if found["fused"] else "u"
