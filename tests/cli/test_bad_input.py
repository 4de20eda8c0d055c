"""What bad input gets: a clear error with code, place and hint, the documented exit code, the source untouched and no output."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.patch import drop, edit_config, edit_index, find, poke, rename, retype

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]


SHARED = "layers.1.ffn.shared_experts"
ROUTED = "layers.0.ffn.experts"
INDEX = "model.safetensors.index.json"


def transpose(root: Path, *names: str) -> None:
    for name in names:
        retype(root, name, shape=find(root, name).entry["shape"][::-1])


def unquantise(root: Path, projection: str) -> None:
    """Turn an FP8 projection into BF16 of half the hidden size in place: same bytes, no scale; gate, up and down stay one MLP."""
    drop(root, f"{projection}.scale")
    n, k = find(root, f"{projection}.weight").entry["shape"]
    retype(root, f"{projection}.weight", dtype="BF16", shape=[n // 2, k] if projection.endswith("w2") else [n, k // 2])


def parts(expert: str, *projections: str) -> list[str]:
    return [f"{expert}.{p}.{s}" for p in projections for s in ("weight", "scale")]


def set_width(config: dict[str, Any]) -> None:
    config["text_config"]["moe_intermediate_size"] = 400


def add_a_manifest(root: Path) -> None:
    (root / "fse").mkdir()
    (root / "fse" / "manifest.json").write_text("{}")


Damage = Callable[[Path], object]


def case(what: str, code: str, place: str, damage: Damage) -> Any:
    return pytest.param(damage, code, place, id=what)


CASES = [
    case("shard cut", "shard-truncated", "model-00003", lambda r: os.truncate(next(r.glob("*3-of*.safetensors")), 500_000)),
    case("shard removed", "shard-missing", "model-00003", lambda r: next(r.glob("*3-of*.safetensors")).unlink()),
    case("dropped scale", "scale-missing", f"{SHARED}.w1", lambda r: drop(r, f"{SHARED}.w1.scale")),
    case("dropped projection", "projection-missing", SHARED, lambda r: drop(r, *parts(SHARED, "w1"))),
    case(
        "dropped expert",
        "expert-missing",
        "layers.1.ffn",
        lambda r: drop(r, *parts("layers.1.ffn.experts.1", "w1", "w2", "w3")),
    ),
    case("transposed scale", "scale-geometry", f"{SHARED}.w1.scale", lambda r: transpose(r, f"{SHARED}.w1.scale")),
    case(
        "scale of another shape that divides",
        "scale-geometry",
        f"{SHARED}.w1.scale",
        lambda r: retype(r, f"{SHARED}.w1.scale", shape=[6, 32]),
    ),
    case("transposed routed scale", "scale-geometry", f"{ROUTED}.1.w2.scale", lambda r: transpose(r, f"{ROUTED}.1.w2.scale")),
    case("transposed down projection", "expert-shape", SHARED, lambda r: transpose(r, *parts(SHARED, "w2"))),
    case("E5M2 weight", "matrix-odd", f"{SHARED}.w2.weight", lambda r: retype(r, f"{SHARED}.w2.weight", dtype="F8_E5M2")),
    case(
        "two scales",
        "matrix-odd",
        f"{SHARED}.w1",
        lambda r: rename(r, f"{SHARED}.w1.scale", f"{SHARED}.w1.weight_scale", keep=True),
    ),
    case("zero points", "matrix-odd", "qzeros", lambda r: rename(r, f"{ROUTED}.0.w1.scale", f"{ROUTED}.0.w1.qzeros", keep=True)),
    case(
        "fourth projection",
        "expert-unknown",
        "layers.0.ffn",
        lambda r: rename(r, "layers.0.attn_norm.weight", f"{ROUTED}.0.w4.weight"),
    ),
    case("NaN weight", "nan", "row 7, column 5", lambda r: poke(r, f"{SHARED}.w3.weight", 512 * 7 + 5, b"\x7f")),
    case("NaN scale", "nan", "row 1, column 1", lambda r: poke(r, f"{SHARED}.w3.scale", 17, b"\xff")),
    case("NaN routed scale", "nan", "row 1, column 0", lambda r: poke(r, f"{ROUTED}.1.w2.scale", 12, b"\xff")),
    case("a manifest", "already-converted", "fse/manifest.json", add_a_manifest),
    case(
        "a name of the kernel layout",
        "already-converted",
        "shared_l1_weight",
        lambda r: rename(r, "norm.weight", "layers.0.ffn.experts.shared_l1_weight"),
    ),
    case("another width in the config", "config-width", "config.json", lambda r: edit_config(r, set_width)),
    case(
        "unknown model type",
        "family-unknown",
        "config.json",
        lambda r: edit_config(r, lambda c: c.update(model_type="x", text_config={})),
    ),
    case("BF16 in one layer", "layers-mixed", "layers.1.ffn", lambda r: [unquantise(r, f"{SHARED}.w{p}") for p in (1, 2, 3)]),
    case("index metadata a list", "index-invalid", INDEX, lambda r: edit_index(r, lambda i: i.update(metadata=["x"]))),
    case(
        "model type a list",
        "family-unknown",
        "config.json",
        lambda r: edit_config(r, lambda c: c.update(model_type=["x"], text_config={})),
    ),
    case("config a list", "json-invalid", "config.json", lambda r: (r / "config.json").write_text("[]")),
]


@pytest.mark.parametrize(("damage", "expected", "place"), CASES)
def test_bad_input(damage: Damage, expected: str, place: str, source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = source(), tmp_path / "out"
    damage(root)
    before = digest(root)
    code, text, err = run(root, out)
    assert code == 3
    assert text == ""
    assert f"error[{expected}]" in err
    assert place in err
    assert digest(root) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    code, text, _ = run(root, out, "--json")
    report = json.loads(text)
    assert (report["ok"], report["exit_code"], code) == (False, 3, 3)
    assert expected in {p["code"] for p in report["problems"]}


@pytest.mark.parametrize(
    ("tensor", "at", "code", "place"),
    [
        pytest.param("layers.0.ffn.experts.1.w2.scale", 12, b"\xff", "row 1, column 0", id="routed scale"),
        pytest.param("layers.1.ffn.shared_experts.w1.weight", 512 * 3 + 9, b"\x7f", "row 3, column 9", id="shared weight"),
        pytest.param("mtp.0.ffn.experts.0.w3.scale", 17, b"\xff", "row 1, column 1", id="MTP scale"),
    ],
)
def test_nan_codes_are_found_where_nothing_is_padded_too(
    tensor: str, at: int, code: bytes, place: str, source: Make, tmp_path: Path, run: Run
) -> None:
    root, out = source(), tmp_path / "out"
    poke(root, tensor, at, code)
    status, _, err = run(root, out, "--target", "megamoe-128", "--workers", "1")
    assert status == 3
    assert "error[nan]" in err
    assert place in err
    assert tensor in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_mixed_layers_are_refused_even_when_unfused_layers_may_pass(source: Make, tmp_path: Path, run: Run) -> None:
    root = source()
    for p in (1, 2, 3):
        unquantise(root, f"{SHARED}.w{p}")
    code, _, err = run(root, tmp_path / "out", "--allow-unfused")
    assert code == 3
    assert "1 of 2 decoder layers would fuse" in err


def test_f32_scales_that_are_no_powers_of_two(source: Make, tmp_path: Path, run: Run) -> None:
    root, out = source("v4-flash-base"), tmp_path / "out"
    poke(root, f"{SHARED}.w1.scale", 4, b"\0\0\xc0\x3f")
    code, _, err = run(root, out)
    assert code == 3
    assert "error[layers-mixed]" in err
    assert f"{SHARED}.w1.scale: scale 1 is 1.5" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("place", "expected"),
    [("source", "output-overlaps"), ("source/inside", "output-overlaps"), ("link", "output-overlaps"), (".", "output-overlaps")],
    ids=["the source", "inside the source", "a link to the source", "a folder above the source"],
)
def test_output_that_touches_the_source(place: str, expected: str, source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root = source()
    (tmp_path / "link").symlink_to(root)
    before = digest(root)
    for extra in ((), ("--overwrite",)):
        code, _, err = run(root, tmp_path / place, *extra)
        assert code == 2
        assert f"error[{expected}]" in err
    assert digest(root) == before


def test_output_that_exists(made: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = made(), tmp_path / "out"
    out.mkdir()
    assert run(root, out)[0] == 2
    assert run(root, out, "--overwrite")[0] == 0
    first = digest(out)
    code, _, err = run(root, out)
    assert code == 2
    assert "error[output-exists]" in err
    assert run(root, out, "--overwrite")[0] == 0
    assert digest(out) == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_overwrite_never_replaces_what_is_not_ours(made: Make, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    code, _, err = run(made(), out, "--overwrite")
    assert code == 2
    assert "error[output-foreign]" in err
    assert (out / "thesis.txt").read_text() == "years of work"


def test_output_without_a_name(made: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", ".."):
        code, _, err = run(made(), out, "--overwrite")
        assert code == 2
        assert "error[output-unnamed]" in err


def test_output_that_is_a_mount_point(made: Make, run: Run) -> None:
    """A container's volume: staging would fill the wrong disk, and the rename could only fail."""
    place = Path("/dev/shm")
    if not place.is_mount() or any(place.iterdir()):
        place = next((p for p in map(Path, ("/proc", "/sys")) if p.is_mount()), place)
    code, _, err = run(made(), place, "--overwrite")
    assert code == 2
    assert "error[output-mounted]" in err or "error[output-foreign]" in err


def test_an_unexpected_failure_is_one_message_and_a_code_of_its_own(
    made: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fse_convert.conversion import run as conversion

    def broken(*_: object) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(conversion, "make_plan", broken)
    code, text, err = run(made(), tmp_path / "out", "--json")
    assert code == json.loads(text)["exit_code"] == 70
    assert "error[bug]: RuntimeError: surprise" in err


def test_no_room_on_the_disk_is_seen_before_writing(made: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    code, _, err = run(made(), tmp_path / "out")
    assert code == 4
    assert "error[no-space]" in err
    assert "976.6 KiB are free" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--target", "vlm-0.30", "a", "b"), "did you mean vllm-0.30?"),
        (("--target", "x", "a", "b"), "see: fse-convert targets"),
        (("--tp", "0", "a", "b"), "0 is not in the range"),
        (("a",), "Missing argument 'OUT'"),
        (("convrt", "a", "b"), "Did you mean 'convert'"),
        (("--nonsense", "a", "b"), "No such option"),
    ],
    ids=["misspelt target", "unknown target", "no ranks", "no OUT", "misspelt command", "unknown option"],
)
def test_usage_errors(args: tuple[str, ...], message: str, run: Run) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert message in err
    assert out == ""


def test_no_such_folder(tmp_path: Path, run: Run) -> None:
    code, _, err = run(tmp_path / "absent", tmp_path / "out")
    assert code == 3
    assert "error[no-such-folder]" in err


def test_help_needs_no_torch_and_lists_exit_codes() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.argv = ['fse-convert', '--help']\nfrom fse_convert.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nassert not {'torch', 'rich', 'safetensors'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "130, 143, 129  stopped by SIGINT, SIGTERM, SIGHUP" in result.stdout
