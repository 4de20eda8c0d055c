"""Hints of the loaders inside servers are true: what a refusal says is done, and then `fse/` opens and fits.

Not followed: flags of vLLM and SGLang, which need the server.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.errors import NotServable
from fse_convert.servers.targets import MEGAMOE_128, MEGAMOE_512
from fse_convert.serving.sidecar import Sidecar, open_sidecar
from fse_convert.testing.patch import edit_manifest, flip

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
KIND = ("megamoe-512", "v4-flash", "--verify", "storage")
KNOBS = {"layers": 1, "experts": 1}
LAYER = "layers.0.ffn.experts"
EXTRA = "model-extra.safetensors"


def refusal(ask: Callable[[], object]) -> dict[str, str]:
    """Hint by code of what a server refuses."""
    with pytest.raises(NotServable) as e:
        ask()
    return {p.code: p.hint for p in e.value.problems}


def read(out: Path) -> Sidecar:
    """Open a sidecar as a server does, with a layer's tensors."""
    sidecar = open_sidecar(out)
    if sidecar.layers:
        sidecar.tensors(LAYER)
        sidecar.check_original(LAYER)
    return sidecar


def put_back(out: Path, written: Path) -> None:
    """Fetch the output again."""
    shutil.rmtree(out)
    shutil.copytree(written, out)


def edit(**changes: Any) -> Callable[[Path], None]:
    return lambda out: edit_manifest(out, lambda manifest: manifest.update(changes))


DAMAGE: dict[str, tuple[str, str, Callable[[Path], object], Callable[[Path, Path], object] | None]] = {
    "no manifest": ("sidecar-missing", "fse-convert CHECKPOINT OUT", lambda o: shutil.rmtree(o / "fse"), None),
    "another manifest": ("manifest-invalid", "fse-convert CHECKPOINT OUT", edit(format="other"), None),
    "edited manifest": ("manifest-damaged", "fetch the output again", lambda o: flip(o / "fse/manifest.json", -20), put_back),
    "no shard in fse/": (
        "sidecar-incomplete", "fetch the output again", lambda o: next(o.glob("fse/shared*")).unlink(), put_back
    ),
    "no shard": ("shard-missing", "fetch the output again", lambda o: next(o.glob("model-00001*")).unlink(), put_back),
    "another shard": (
        "shard-unlisted",
        "move it out of the folder",
        lambda o: shutil.copy(next(o.glob("model-00001*")), o / EXTRA),
        lambda o, _: (o / EXTRA).rename(o.parent / EXTRA),
    ),
    "edited config": (
        "sidecar-stale",
        "put the written one back",
        lambda o: (o / "config.json").write_text(json.dumps(json.loads((o / "config.json").read_text()))),
        lambda o, written: shutil.copy(written / "config.json", o),
    ),
    "damaged tensor": ("sidecar-damaged", "fetch the output again", lambda o: flip(o, 0, f"{LAYER}.shared_l1_weight"), put_back),
}  # fmt: skip
"""By what is done: code, words of the hint, the damage, and what the hint says; None: convert again."""


@pytest.mark.parametrize("what", DAMAGE)
def test_a_hint_about_an_output(what: str, output: Make, converted: Make, made: Make, run: Run, tmp_path: Path) -> None:
    code, words, damage, follow = DAMAGE[what]
    out = output(*KIND, **KNOBS)
    damage(out)
    assert words in refusal(lambda: read(out))[code]
    if follow:
        follow(out, converted(*KIND, **KNOBS))
    else:
        shutil.rmtree(out)
        assert run(made("v4-flash", **KNOBS), out, "-q", "--verify", "storage")[0] == 0
    assert read(out).layers == open_sidecar(converted(*KIND, **KNOBS)).layers


@pytest.mark.parametrize(
    ("options", "server", "code"),
    [
        (["--target", "megamoe-128"], {"routed_width": 512, "contract": MEGAMOE_512}, "contract-mismatch"),
        (["--target", "megamoe-512"], {"routed_width": 384, "contract": MEGAMOE_128}, "width-mismatch"),
        (["--target", "megamoe-512", "--experts", "shared"], {"routed_width": 384, "contract": MEGAMOE_128}, "width-mismatch"),
    ],
    ids=["another kernel", "another width", "shared experts alone"],
)
def test_a_target_that_a_refusal_names(
    options: list[str], server: dict[str, Any], code: str, made: Make, run: Run, tmp_path: Path
) -> None:
    root, asked = made("v4-flash", **KNOBS), {"hidden": 512, "n_shared": 1, **server}
    assert run(root, tmp_path / "out", "-q", "--verify", "storage", *options)[0] == 0
    hint = refusal(lambda: open_sidecar(tmp_path / "out").check(**asked))[code]
    target = re.search(r"fse-convert CHECKPOINT OUT --target ([\w.-]+)", hint)
    assert target
    assert run(root, tmp_path / "again", "-q", "--verify", "storage", "--target", target[1])[0] == 0
    open_sidecar(tmp_path / "again").check(**asked)
    if "--experts" in options:
        assert hint.endswith("; or without --experts shared")
        assert run(root, tmp_path / "all", "-q", "--verify", "storage", *options[:2])[0] == 0
        open_sidecar(tmp_path / "all").check(**{**asked, "routed_width": 512})


def test_an_inspection_says_why_nothing_is_in_kernel_layout(made: Make, run: Run, tmp_path: Path) -> None:
    root = made("bf16", **KNOBS)
    assert run(root, tmp_path / "out", "-q", "--verify", "storage", "--allow-unfused")[0] == 0
    sidecar = open_sidecar(tmp_path / "out")
    hint = refusal(lambda: sidecar.check(hidden=512, routed_width=512, n_shared=1, contract=MEGAMOE_512))["sidecar-empty"]
    command = hint.removeprefix("see why: fse-convert ").replace("CHECKPOINT", str(root)).split()
    code, text, _ = run(*command, "--json")
    assert code == 0
    assert json.loads(text)["targets"][0]["reasons"]
