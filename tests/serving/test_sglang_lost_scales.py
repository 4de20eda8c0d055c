"""Checkpoints whose scales SGLang drops in silence are refused before a weight is read; all others pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.errors import NotServable
from fse_convert.serving.sglang import hooks
from fse_convert.testing.patch import edit_config, read_header, retype

Make = Callable[..., Path]


def prepare(root: Path) -> None:
    """What SGLang calls once it knows the folder."""
    hooks.after_prepare_weights((str(root), [], True), None, str(root))


@pytest.mark.parametrize("kind", ["v4-flash", "v4.1-flash", "quark-mxfp4", "kimi-k2-quark", "v4-flash-fp8", "v3", "bf16"])
def test_checkpoints_that_sglang_reads_pass(kind: str, made: Make) -> None:
    prepare(made(kind, layers=2))


def test_a_folder_that_is_no_checkpoint_is_sglang_s(tmp_path: Path) -> None:
    prepare(tmp_path)


def test_quark_scales_with_another_label_are_refused(source: Make) -> None:
    root = source("quark-mxfp4", layers=2)
    for shard in root.glob("*.safetensors"):
        for name, entry in read_header(shard)[0].items():
            if name.endswith("experts.0.w1.weight_scale") and entry["dtype"] == "U8":
                retype(root, name, dtype="F8_E8M0")
    with pytest.raises(NotServable, match=r"experts\.0\.w1\.weight_scale is labelled F8_E8M0.*\[quark-e8m0-typed\]"):
        prepare(root)


def into_text_config(config: dict[str, Any]) -> None:
    config["text_config"] = {"quantization_config": config.pop("quantization_config")}


def under_another_name(config: dict[str, Any]) -> None:
    config["compression_config"] = config.pop("quantization_config")


def by_another_name(config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_method"] = "deepseek_v4_fp8"


@pytest.mark.parametrize("edit", [lambda _: None, into_text_config, under_another_name, by_another_name])
def test_shared_experts_of_mxfp4_under_fp8_are_refused(edit: Callable[[dict[str, Any]], None], source: Make) -> None:
    """Wherever `inspect` finds the method (hazards.py: slot-scale-lost)."""
    root = source("v4-flash", layers=2, stored={"shared": "mxfp4"})
    edit_config(root, edit)
    with pytest.raises(NotServable, match=r"\[slot-scale-lost\]"):
        prepare(root)


def test_without_a_quantisation_nothing_is_dropped(source: Make) -> None:
    root = source("v4-flash", layers=2, stored={"shared": "mxfp4"})
    edit_config(root, lambda config: config.pop("quantization_config"))
    prepare(root)
