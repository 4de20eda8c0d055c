"""Every conflict of a config with the tensors, wherever the key is written: `inspect --require` and `convert` give one answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fse_convert.model.config_against_tensors import UNFIT

Made = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]

TARGET = "sglang-0.5.23"
"""A server that fuses the source, and whose own rules read none of these keys."""
NUMBERS = {
    "width": ("moe_intermediate_size", 384, 512, "config-width"),
    "hidden": ("hidden_size", 512, 1024, "config-hidden"),
    "count": ("n_routed_experts", 3, 4, "config-experts"),
    "shared count": ("n_shared_experts", 1, 2, "config-width"),
}
"""Key, its right and a wrong value, and the code of the conflict."""
SECTIONS = ("", "text_config")
MENDED = {("expert_dtype", where) for where in (*SECTIONS, "quantization_config")}
"""Keys and places that a conversion for a server writes anew by what the tensors are."""
QUANTISATIONS = ("quantization_config", "text_config.quantization_config", "compression_config", "hf_quant_config.json")


def cases() -> Iterator[Any]:
    def case(what: str, where: str, *values: object, method: str = "fp8") -> Any:
        return pytest.param(where, *values, method, id=f"{what} in {where or 'top level'}, {method}")

    for what, (key, right, wrong, code) in NUMBERS.items():
        yield from (case(what, where, key, right, wrong, code) for where in SECTIONS)
    for method in ("fp8", "FP8", "deepseek_v4_fp8"):
        for where in (*SECTIONS, *QUANTISATIONS):
            yield case("block", where, "weight_block_size", [32, 32], [128, 128], "config-block", method=method)
            yield case("expert dtype", where, "expert_dtype", "fp4", "fp8", "config-expert-dtype", method=method)
    for wrong in ("gptq", "AWQ"):
        for where in QUANTISATIONS:
            yield case(f"method {wrong}", where, "quant_method", "fp8", wrong, "quantization-method")


def write(root: Path, where: str, key: str, value: object, method: str) -> None:
    """Write a key in one place and nowhere else; the quantisation moves to that place if it is one of its own."""
    config = json.loads((root / "config.json").read_text())
    quantisation = {**config.pop("quantization_config"), "quant_method": method}
    for place in (config, config["text_config"], quantisation):
        place.pop(key, None)
    if where in SECTIONS:
        (config[where] if where else config)[key] = value
    else:
        quantisation[key] = value
        quantisation.setdefault("quant_method", method)
    home = where if where in QUANTISATIONS else "quantization_config"
    if home == "hf_quant_config.json":
        (root / home).write_text(json.dumps(quantisation))
    else:
        section, _, name = home.rpartition(".")
        (config[section] if section else config)[name] = quantisation
    (root / "config.json").write_text(json.dumps(config))


def link_shards(source: str, copy: str) -> None:
    """Copy small files, which are edited, and link the rest."""
    if source.endswith(".safetensors"):
        Path(copy).symlink_to(source)
    else:
        shutil.copy(source, copy)


@pytest.mark.parametrize(("where", "key", "right", "wrong", "code", "method"), list(cases()))
def test_a_conflict_is_refused_by_both_and_the_right_value_by_neither(
    where: str, key: str, right: object, wrong: object, code: str, method: str, made: Made, tmp_path: Path, run: Run
) -> None:
    broken = 3 if code in UNFIT else 1
    for value, gate, conversion, expected in ((wrong, broken, 3, {code}), (right, 0, 0, set())):
        root = tmp_path / f"source {gate}"
        shutil.copytree(made(layers=1, mtp=0), root, copy_function=link_shards)
        write(root, where, key, value, method)
        exit_code, text, _ = run("inspect", root, "--require", TARGET, "--json")
        found = json.loads(text)
        assert (exit_code, {c["code"] for c in (*found["problems"], *found["conflicts"])} & {code}) == (gate, expected)
        assert run("inspect", root)[0] == (gate if gate == 3 else 0), "without a gate too, where nothing mends it"
        exit_code, text, _ = run(root, tmp_path / "out", "--target", TARGET, "--allow-unfused", "--dry-run", "--json")
        mended = value is wrong and (key, where) in MENDED
        assert exit_code == (0 if mended else conversion)
        assert {p["code"] for p in json.loads(text).get("problems", [])} & {code} == (set() if mended else expected)
        if mended:
            assert [c["name"] for c in json.loads(text)["changes"]] == ["heal-expert-dtype"]
