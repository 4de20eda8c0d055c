"""What ``--json`` prints is what the records say: every key, its type and its order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fse_convert.report.inspection.records import InspectionRecord
from fse_convert.report.lists import TargetsRecord
from fse_convert.report.records import ConversionRecord, Failure, ProofRecord, Record, RestorationRecord, dump

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


def check(printed: str, record: type[Record]) -> dict[str, Any]:
    """Read an object as a record, and write it again to the same text."""
    assert dump(msgspec.json.decode(printed, type=record)) == printed.rstrip("\n")
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.parametrize("kind", ["v4.1-flash", "v4-flash", "v3", "quark-mxfp4", "nvfp4", "bf16"])
def test_an_inspection(kind: str, made: Made, run: Run) -> None:
    found = check(run("inspect", made(kind), "--json", "--require", "vllm-0.33")[1], InspectionRecord)
    assert found["required"][0]["target"] == "vllm-0.33"


def test_a_conversion_and_what_follows(made: Made, run: Run, tmp_path: Path) -> None:
    source, out = made(), tmp_path / "out"
    planned = check(run(source, out, "--target", "vllm-0.30", "--dry-run", "--json")[1], ConversionRecord)
    assert list(planned)[-2:] == ["notes", "needs"]
    done = check(run(source, out, "--target", "vllm-0.30", "--json")[1], ConversionRecord)
    assert list(done)[-4:] == ["notes", "files", "bytes", "proof"]
    assert next(iter(done["proof"])) == "level"
    proof = check(run("verify", out, "--source", source, "--level", "kernel", "--json")[1], ProofRecord)
    assert list(proof)[:4] == ["schema_version", "ok", "exit_code", "level"]
    check(run("verify", out, "--json")[1], ProofRecord)
    check(run("restore", out, tmp_path / "back", "--json")[1], RestorationRecord)


def test_mismatches(made: Made, run: Run, tmp_path: Path) -> None:
    source, out = made(), tmp_path / "out"
    run(source, out)
    with next(out.glob("*.safetensors")).open("r+b") as f:
        f.seek(-1, 2)
        f.write(b"\xa5")
    proof = check(run("verify", out, "--source", source, "--json")[1], ProofRecord)
    assert (proof["ok"], proof["exit_code"], proof["storage"]["mismatch_count"]) == (False, 1, len(proof["storage"]["mismatches"]))


def test_targets_and_failures(run: Run, tmp_path: Path) -> None:
    targets = check(run("targets", "--json")[1], TargetsRecord)["targets"]
    assert ["contract" in t for t in targets] == [t["question"] == "native-megamoe" for t in targets]
    assert check(run("inspect", tmp_path, "--json")[1], InspectionRecord)["exit_code"] == 3
    assert check(run("inspect", tmp_path / "no", "--json")[1], Failure)["exit_code"] == 3


@pytest.mark.parametrize("record", [InspectionRecord, ConversionRecord, ProofRecord, RestorationRecord, TargetsRecord, Failure])
def test_every_response_has_a_schema(record: type[Record]) -> None:
    schema = msgspec.json.schema(record)
    assert schema["$defs"][record.__name__]["properties"]["schema_version"]
