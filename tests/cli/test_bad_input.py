"""What bad input gets: a clear error with code, place and hint, the documented exit code, the source untouched and no output."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from fse_convert.checkpoint.header import Header, TensorInfo, parse_header

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]


def find(root: Path, tensor: str) -> tuple[Path, Header, TensorInfo]:
    for path in root.glob("*.safetensors"):
        raw = path.read_bytes()
        header = parse_header(raw[8 : 8 + int.from_bytes(raw[:8], "little")], len(raw), path.name)
        for info in header.tensors:
            if info.name == tensor:
                return path, header, info
    raise KeyError(tensor)


def poke(root: Path, tensor: str, at: int, value: bytes) -> None:
    path, header, info = find(root, tensor)
    with path.open("r+b") as f:
        f.seek(header.data_start + info.start + at)
        f.write(value)


def rewrite(root: Path, tensor: str, change: Callable[[dict[str, object]], dict[str, object] | None]) -> None:
    """Change or drop a tensor's header entry, keeping header and file consistent; dropped bytes go with it."""
    path, header, _ = find(root, tensor)
    raw = path.read_bytes()
    entries: dict[str, object] = {}
    payload, at = b"", 0
    for t in header.tensors:
        data = raw[header.data_start + t.start : header.data_start + t.end]
        entry: dict[str, object] | None = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + len(data)]}
        if t.name == tensor:
            entry = change(entry or {})
        if entry is not None:
            entries[t.name] = entry
            payload += data
            at += len(data)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    if tensor not in entries:
        index = root / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"][tensor]
        index.write_text(json.dumps(content))


SHARED = "layers.1.ffn.shared_experts"


def drop(_: dict[str, object]) -> None:
    return None


def transposed(entry: dict[str, object]) -> dict[str, object]:
    return {**entry, "shape": list(reversed(entry["shape"]))}  # type: ignore[call-overload]


def reshaped(*shape: int) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda entry: {**entry, "shape": list(shape)}


def edit_config(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    config = json.loads((root / "config.json").read_text())
    change(config)
    (root / "config.json").write_text(json.dumps(config))


def edit_index(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = root / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def width(config: dict[str, object]) -> None:
    config["text_config"]["moe_intermediate_size"] = 400  # type: ignore[index]


def rewrite_both(root: Path) -> None:
    rewrite(root, f"{SHARED}.w2.weight", transposed)
    rewrite(root, f"{SHARED}.w2.scale", transposed)


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard-truncated": (lambda r: os.truncate(next(r.glob("*3-of*.safetensors")), 5_000_00), "model-00003"),
    "shard-missing": (lambda r: next(r.glob("*3-of*.safetensors")).unlink(), "model-00003"),
    "scale-missing": (lambda r: rewrite(r, f"{SHARED}.w1.scale", drop), f"{SHARED}.w1"),
    "projection-missing": (lambda r: [rewrite(r, f"{SHARED}.w1.{s}", drop) for s in ("weight", "scale")], SHARED),
    "expert-missing": (
        lambda r: [rewrite(r, f"layers.1.ffn.experts.1.w{p}.{s}", drop) for p in (1, 2, 3) for s in ("weight", "scale")],
        "layers.1.ffn",
    ),
    "scale-geometry": (lambda r: rewrite(r, f"{SHARED}.w1.scale", transposed), f"{SHARED}.w1.scale"),
    "scale-geometry wrong but dividing": (lambda r: rewrite(r, f"{SHARED}.w1.scale", reshaped(6, 32)), f"{SHARED}.w1.scale"),
    "scale-geometry routed": (
        lambda r: rewrite(r, "layers.0.ffn.experts.1.w2.scale", transposed),
        "layers.0.ffn.experts.1.w2.scale",
    ),
    "expert-shape": (rewrite_both, "layers.1.ffn.shared_experts"),
    "dtype-unsupported": (lambda r: rewrite(r, f"{SHARED}.w2.weight", lambda e: {**e, "dtype": "F8_E5M2"}), f"{SHARED}.w2.weight"),
    "part-ambiguous": (lambda r: rename(r, f"{SHARED}.w1.scale", f"{SHARED}.w1.weight_scale", keep=True), f"{SHARED}.w1"),
    "part-unknown": (
        lambda r: rename(r, "layers.0.ffn.experts.0.w1.scale", "layers.0.ffn.experts.0.w1.qzeros", keep=True),
        "qzeros",
    ),
    "expert-unknown": (lambda r: rename(r, "layers.0.attn_norm.weight", "layers.0.ffn.experts.0.w4.weight"), "layers.0.ffn"),
    "nan": (lambda r: poke(r, f"{SHARED}.w3.weight", 512 * 7 + 5, b"\x7f"), "row 7, column 5"),
    "nan scale": (lambda r: poke(r, f"{SHARED}.w3.scale", 17, b"\xff"), "row 1, column 1"),
    "nan routed scale": (lambda r: poke(r, "layers.0.ffn.experts.1.w2.scale", 12, b"\xff"), "row 1, column 0"),
    "already-converted": (lambda r: ((r / "fse").mkdir(), (r / "fse" / "manifest.json").write_text("{}")), "fse/manifest.json"),
    "already-converted names": (lambda r: rename(r, "norm.weight", "layers.0.ffn.experts.shared_l1_weight"), "shared_l1_weight"),
    "config-width": (lambda r: edit_config(r, width), "config.json"),
    "family-unknown": (lambda r: edit_config(r, lambda c: c.update(model_type="x", text_config={})), "config.json"),
    "layers-mixed": (lambda r: [unquantise(r, f"{SHARED}.w{p}") for p in (1, 2, 3)], "layers.1.ffn"),
    "index-invalid": (lambda r: edit_index(r, lambda i: i.update(metadata=["x"])), "model.safetensors.index.json"),
    "family-unknown list": (lambda r: edit_config(r, lambda c: c.update(model_type=["x"], text_config={})), "config.json"),
    "json-invalid": (lambda r: (r / "config.json").write_text("[]"), "config.json"),
}


def rename(root: Path, old: str, new: str, *, keep: bool = False) -> None:
    """Rename a tensor in header and index; or add a copy of it under the new name."""
    path, header, info = find(root, old)
    raw = path.read_bytes()
    entries = {t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.end]} for t in header.tensors}
    payload = raw[header.data_start :]
    if keep:
        entries[new] = {**entries[old], "data_offsets": [len(payload), len(payload) + info.nbytes]}
        payload += raw[header.data_start + info.start : header.data_start + info.end]
    else:
        entries[new] = entries.pop(old)
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    index = root / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][new] = content["weight_map"][old]
    if not keep:
        del content["weight_map"][old]
    index.write_text(json.dumps(content))


def unquantise(root: Path, projection: str) -> None:
    """Turn an FP8 projection into BF16 of half the hidden size in place: same bytes, no scale; gate, up and down stay one MLP."""
    rewrite(root, f"{projection}.scale", drop)
    _, _, info = find(root, f"{projection}.weight")
    n, k = info.shape
    shape = [n // 2, k] if projection.endswith("w2") else [n, k // 2]
    rewrite(root, f"{projection}.weight", lambda e: {**e, "dtype": "BF16", "shape": shape})


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = source(), tmp_path / "out"
    damage, place = CASES[name]
    damage(root)
    before = digest(root)
    code, text, err = run(root, out)
    assert code == 3
    assert text == ""
    assert f"error[{name.split(maxsplit=1)[0]}]" in err
    assert place in err
    assert digest(root) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    code, text, _ = run(root, out, "--json")
    report = json.loads(text)
    assert (report["ok"], report["exit_code"], code) == (False, 3, 3)
    assert name.split(maxsplit=1)[0] in {p["code"] for p in report["problems"]}


@pytest.mark.parametrize(
    ("tensor", "at", "code", "place"),
    [
        ("layers.0.ffn.experts.1.w2.scale", 12, b"\xff", "row 1, column 0"),
        ("layers.1.ffn.shared_experts.w1.weight", 512 * 3 + 9, b"\x7f", "row 3, column 9"),
        ("mtp.0.ffn.experts.0.w3.scale", 17, b"\xff", "row 1, column 1"),
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
    assert "1,000,000 are free" in err
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
