"""The way back of changed formats: every file of the source, byte for byte, from the output alone; and what is refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.output.copying import Link
from fse_convert.progress import Event
from fse_convert.restoration import recipes as formats
from fse_convert.restoration.run import Restoration
from fse_convert.sidecar.manifest import read_manifest
from fse_convert.testing.patch import ShardPatch, edit_manifest, find, flip, poke, read_shard, retype, write_shard
from tests.plan.changes.models import AITER, SMALL
from tests.plan.changes.recipes import RECIPES, Recipe, retyped

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
Digest = Callable[[Path], dict[str, str]]
Changed = Callable[..., tuple[Path, Path]]
FP8 = ("--routed", "fp8")
MXFP4 = ("--shared", "mxfp4", "--lossy")
AMD = ("--target", "vllm-0.33-aiter")
RECODED = [
    *((kind, FP8) for kind in ("v4-flash", "v4-flash-0731", "v4-pro", "v4.1-flash")),
    *((kind, MXFP4) for kind in ("v4-flash", "kimi-k2-quark", "glm-4.5-quark", "qwen3.5-quark")),
    ("v4-flash-fp8", AMD),
]


def restores(run: Run, out: Path, original: Path, want: dict[str, str], digest: Digest) -> str:
    """Restore an output, compare every file with the source's; return what was printed."""
    code, text, err = run("restore", out, original)
    assert code == 0, err
    assert digest(original) == want
    return text


@pytest.mark.parametrize(("kind", "options"), RECODED)
def test_every_file_comes_back(
    kind: str, options: tuple[str, ...], changed: Changed, tmp_path: Path, run: Run, digest: Digest
) -> None:
    root, out = changed(kind, *options, **({"width": 192} if kind == "v4.1-flash" else {}))
    assert digest(out).keys() > digest(root).keys()
    text = restores(run, out, tmp_path / "original", digest(root), digest)
    assert "every tensor that was read had the digest that the manifest states" in text
    assert re.search(r" tensors, format of \d+ restored; ", text)


def helped(recipe: Recipe) -> str:
    """The oldest release of vLLM on ROCm that fuses every decoder layer after the changes and not before; empty if none does."""
    found = [
        name for name, was, then in zip(AITER, recipe.before, recipe.after, strict=True) if was != then and set(then[:-1]) == {"f"}
    ]
    return found[0] if found else ""


@pytest.mark.parametrize("recipe", [r for r in RECIPES if helped(r)], ids=lambda recipe: recipe.name)
def test_every_recipe_is_undone(recipe: Recipe, source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    by_name = {"routed-fp8": FP8, "shared-mxfp4": MXFP4}
    root, out = source(recipe.kind, **{**SMALL, "sparse": False}, **recipe.knobs), tmp_path / "out"
    recipe.damage(root)
    assert run(root, out, *by_name.get(recipe.changes[0], ("--target", helped(recipe))), "--verify", "none", "-q")[0] == 0
    changes = read_manifest(LocalFolder(out)).changes
    assert isinstance(changes, list)
    assert {change.name for change in changes} == set(recipe.changes) - {"heal-quark-weight-labels"}, "no server needs those"
    restores(run, out, tmp_path / "original", digest(root), digest)


def test_labels_of_scales_come_back(source: Make, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = source("quark-mxfp4", width=256), tmp_path / "out"
    retyped("U8", "F8_E8M0", ".weight_scale")(root)
    assert run(root, out, "--target", "sglang-0.5.23-slots", "--verify", "none", "-q")[0] == 0
    assert [c["name"] for c in json.loads((out / "fse/manifest.json").read_text())["changes"]] == ["heal-quark-scale-labels"]
    text = restores(run, out, tmp_path / "original", digest(root), digest)
    assert "tensors were not checked on the way" in text


def exotic(root: Path) -> None:
    """Fill the routed experts with groups of every sort: small codes only, zeros of both signs under odd exponents."""
    dice = random.Random(0)
    for shard in sorted(root.glob("*.safetensors")):
        with ShardPatch(shard) as patch:
            for name, scale in patch.tensors.items():
                if ".experts." in name and name.endswith(".scale"):
                    weight = name.replace(".scale", ".weight")
                    groups = [group(dice, 100 + 9 * i // len(scale.data)) for i in range(len(scale.data))]
                    codes, exponents = b"".join(codes for codes, _ in groups), bytes(e for _, e in groups)
                    patch.tensors[weight] = patch.tensors[weight]._replace(data=codes)
                    patch.tensors[name] = scale._replace(data=exponents)


def group(dice: random.Random, base: int) -> tuple[bytes, int]:
    """Sixteen bytes of codes up to a greatest one, 0 to 7, of either sign, and an exponent; of zeros any that is no NaN."""
    most = dice.choice([0, 1, 2, 3, 4, 5, 7])
    codes = [dice.randint(0, most) | dice.choice([0, 8]) for _ in range(32)]
    exponent = base + dice.randint(0, 4) if any(code & 7 for code in codes) else dice.choice([0, 1, 99, 254])
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)), exponent


@pytest.mark.parametrize(("weight", "scale"), [("I8", "F8_E8M0"), ("U8", "U8")])
@pytest.mark.parametrize("chunk", [1, formats.CHUNK])
def test_groups_that_follow_no_rule_come_back(
    chunk: int, weight: str, scale: str, source: Make, tmp_path: Path, run: Run, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one band, or in bands of one row of blocks."""
    root, out = source("v4-flash", hidden=320, width=160, layers=1, experts=1), tmp_path / "out"
    exotic(root)
    for label in (retyped("I8", weight, ".weight"), retyped("F8_E8M0", scale, ".scale")):
        label(root)
    assert run(root, out, *FP8, "--verify", "none", "-q")[0] == 0
    monkeypatch.setattr(formats, "CHUNK", chunk)
    restores(run, out, tmp_path / "original", digest(root), digest)


EXPERT, NORM = "layers.1.ffn.experts.0.w1", "layers.1.attn_norm.weight"
SHARED = "layers.1.ffn.shared_experts.w1.scale"
SHARD = "model-00003-of-00005.safetensors"
ORIGINALS = f"fse/original-{SHARD}"


def refused(out: Path, tmp_path: Path, run: Run) -> tuple[int, str]:
    """Restore what must not be; return the exit code and the message. Nothing may be published."""
    before = sorted(p.name for p in tmp_path.iterdir())
    code, _, err = run("restore", out, tmp_path / "original")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert err.count("error[") == 1, err
    return code, err[err.index("error[") :]


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Damage to the manifest, under a digest that is made again."""
    return lambda out: edit_manifest(out, change)


def header(edit: Callable[[str], str], **identity: object) -> Callable[[Path], None]:
    """Damage to the text of the source's header, and to what is said of its file; its digest is made again."""

    def change(content: dict[str, Any]) -> None:
        source = content["source"]
        text = source["originals"][SHARD] = edit(source["originals"][SHARD])
        raw = text.encode()
        digest = hashlib.sha256(len(raw).to_bytes(8, "little") + raw).hexdigest()
        source["shards"][SHARD].update({"header_sha256": digest, **identity})

    return manifest(change)


def original(name: str, **changes: Any) -> Callable[[Path], None]:
    """Damage to what the header of an original says."""

    def damage(out: Path) -> None:
        with ShardPatch(out / ORIGINALS) as patch:
            patch.tensors[f"original.{name}"] = patch.tensors[f"original.{name}"]._replace(**changes)

    return damage


def without_an_original(out: Path) -> None:
    with ShardPatch(out / ORIGINALS) as patch:
        del patch.tensors[f"original.{EXPERT}.scale"]


def cut(out: Path) -> None:
    raw = (out / ORIGINALS).read_bytes()
    (out / ORIGINALS).write_bytes(raw[:-1])


def swapped(text: str) -> str:
    """A header in which two tensors of other sizes have each other's names."""
    return text.replace(NORM, "x").replace(SHARED, NORM).replace('"x"', f'"{SHARED}"')


def with_names_swapped(name: str, one: str, other: str) -> Callable[[Path], object]:
    """Damage to a shard's header: two tensors of an expert that are stored alike have each other's names, and new digests."""

    def damage(out: Path) -> None:
        prefix = f"{'original.' * name.startswith('fse/')}layers.1.ffn.experts.0"
        names = {f"{prefix}{one}": f"{prefix}{other}", f"{prefix}{other}": f"{prefix}{one}"}
        entries, payload = read_shard(out / name)
        write_shard(out / name, {names.get(key, key): entry for key, entry in entries.items()}, payload)
        digests = {new: read_manifest(LocalFolder(out)).tensors[old] for old, new in names.items()}  # type: ignore[index]
        edit_manifest(out, lambda manifest: manifest["tensors"].update(digests))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "a weight": (lambda out: flip(out, 5, f"{EXPERT}.weight"), 1, "tensor-damaged"),
    "F32 scales of routed experts": (lambda out: flip(out, 3, f"{EXPERT}.scale"), 1, "tensor-damaged"),
    "F32 scales of a shared expert": (lambda out: flip(out, 3, SHARED), 1, "tensor-damaged"),
    "an original": (lambda out: flip(out, 5, f"original.{EXPERT}.scale"), 1, "tensor-damaged"),
    "another tensor": (lambda out: flip(out, 0, NORM), 1, "tensor-damaged"),
    "another tensor's dtype": (lambda out: retype(out, NORM, dtype="U8", shape=[640]), 1, "tensor-missing"),
    "a weight's dtype": (lambda out: retype(out, f"{EXPERT}.weight", dtype="U8"), 1, "tensor-missing"),
    "a weight's shape": (lambda out: retype(out, f"{EXPERT}.weight", shape=[320, 160]), 1, "tensor-missing"),
    "a weight in one dimension": (lambda out: retype(out, f"{EXPERT}.weight", shape=[160 * 320]), 1, "tensor-missing"),
    "the dtype of F32 scales": (lambda out: retype(out, f"{EXPERT}.scale", dtype="I32"), 1, "tensor-missing"),
    "the shape of F32 scales": (lambda out: retype(out, f"{EXPERT}.scale", shape=[6, 1]), 1, "tensor-missing"),
    "F32 scales in one dimension": (lambda out: retype(out, f"{EXPERT}.scale", shape=[6]), 1, "tensor-missing"),
    "F32 scales of a shared expert, their dtype": (lambda out: retype(out, SHARED, dtype="I32"), 1, "tensor-missing"),
    "an original's dtype": (original(f"{EXPERT}.scale", dtype="I8"), 1, "tensor-missing"),
    "an original's shape": (original(f"{EXPERT}.scale", shape=[1600]), 1, "tensor-missing"),
    "an original's size": (original(f"{EXPERT}.scale", shape=[1], data=b"x"), 1, "tensor-missing"),
    "an original gone": (without_an_original, 1, "tensor-missing"),
    "a file of originals, its end": (cut, 3, "shard-truncated"),
    "a file of originals gone": (lambda out: (out / ORIGINALS).unlink(), 1, "file-missing"),
    "the manifest": (lambda out: edit_manifest(out, lambda m: m["changes"].clear(), signed=False), 1, "manifest-damaged"),
    "no changes": (manifest(lambda m: m.pop("changes")), 1, "header-unlike"),
    "no header": (manifest(lambda m: m["source"]["originals"].pop(SHARD)), 1, "header-unlike"),
    "no shard": (manifest(lambda m: m["source"]["shards"].pop(SHARD)), 1, "shard-unknown"),
    "another header": (manifest(lambda m: m["source"]["originals"].update({SHARD: "{}"})), 1, "original-unknown"),
    "a header that is no JSON": (header(lambda text: text[:-9]), 1, "manifest-damaged"),
    "a header of nothing": (header(lambda text: "{}"), 1, "manifest-damaged"),
    "another size": (header(str, size=10), 1, "manifest-damaged"),
    "a header with another dtype": (header(lambda text: text.replace("F8_E8M0", "F8_E5M2")), 1, "tensor-missing"),
    "a header with other names": (header(swapped), 1, "tensor-order"),
    "the names of two weights, digests made again": (with_names_swapped(SHARD, ".w1.weight", ".w3.weight"), 1, "tensor-order"),
    "those of two originals": (with_names_swapped(ORIGINALS, ".w1.scale", ".w3.scale"), 1, "tensor-order"),
    "names that lead nowhere": (manifest(lambda m: m.update(renamed={NORM: "nowhere"})), 1, "tensor-missing"),
}


@pytest.mark.parametrize(("damage", "status", "code"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_output_is_refused(
    damage: Callable[[Path], object], status: int, code: str, out: Path, tmp_path: Path, run: Run
) -> None:
    damage(out)
    told, err = refused(out, tmp_path, run)
    assert (told, f"error[{code}]" in err) == (status, True), err


def test_what_no_source_can_have_become_is_refused_without_digests(out: Path, tmp_path: Path, run: Run) -> None:
    edit_manifest(out, lambda m: m.update(files=None, tensors=None))
    at = find(out, f"{EXPERT}.weight").nbytes - 1
    before = poke(out, f"{EXPERT}.weight", at, b"\x7f")
    _, err = refused(out, tmp_path, run)
    assert "error[tensor-damaged]: no source can have become it" in err
    assert "row 159, columns 318 to 319" in err
    assert f"{SHARD}: {EXPERT}.weight" in err
    poke(out, f"{EXPERT}.weight", at, before)
    for scales in (SHARED, f"{EXPERT}.scale"):
        for bits in (b"\0\0\0\0", b"\1\0\0\x3f", b"\0\0\xc0\x7f", b"\0\0\x80\xbf"):
            before = poke(out, scales, 0, bits)
            assert "error[tensor-damaged]: no source can have become it: scale 0 is" in refused(out, tmp_path, run)[1]
            poke(out, scales, 0, before)
    (out / ORIGINALS).unlink()
    assert "error[tensor-missing]" in refused(out, tmp_path, run)[1]


@pytest.mark.parametrize("damage", ["twice the scale", "scales of other blocks"])
def test_values_that_are_possible_but_were_never_coded_so_are_refused(damage: str, source: Make, tmp_path: Path, run: Run) -> None:
    """Without digests: every code is one of MXFP4 all the same."""
    root, out = source("v4-flash", hidden=320, width=160, layers=2, experts=2), tmp_path / "out"
    with ShardPatch(root / SHARD) as patch:
        rows = [bytes([100 + (row >= 128)]) * 10 for row in range(160)]
        patch.tensors[f"{EXPERT}.weight"] = patch.tensors[f"{EXPERT}.weight"]._replace(data=b"\x22" * (160 * 160))
        patch.tensors[f"{EXPERT}.scale"] = patch.tensors[f"{EXPERT}.scale"]._replace(data=b"".join(rows))
    assert run(root, out, *FP8, "--verify", "none", "-q")[0] == 0
    if damage == "twice the scale":
        (before,) = poke(out, f"{EXPERT}.scale", 2, b"\0")
        poke(out, f"{EXPERT}.scale", 2, bytes([before ^ 0x80]))
    else:
        retype(out, f"{EXPERT}.scale", shape=[3, 2])
    assert "no source can have become it: blocks of rows 0 to 159 would have other scales" in refused(out, tmp_path, run)[1]


def test_the_row_that_is_named_is_the_tensor_s(out: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "CHUNK", 1)  # bands of 128 rows
    poke(out, f"{EXPERT}.weight", 130 * 320 + 64, b"\x7f")
    assert "row 130, columns 64 to 65" in refused(out, tmp_path, run)[1]


@pytest.mark.parametrize(("kind", "options"), [("v4-flash", FP8), ("v4-flash", MXFP4), ("kimi-k2-quark", MXFP4)])
def test_without_originals_there_is_no_way_back(
    kind: str, options: tuple[str, ...], changed: Changed, tmp_path: Path, run: Run
) -> None:
    _, out = changed(kind, *options, "--drop-originals")
    assert not list(out.glob("fse/original-*"))
    code, err = refused(out, tmp_path, run)
    assert (code, "error[originals-dropped]" in err) == (3, True)


def test_changes_that_need_no_originals_leave_none_out(changed: Changed, tmp_path: Path, run: Run, digest: Digest) -> None:
    root, out = changed("v4-flash-fp8", *AMD, "--drop-originals")
    restores(run, out, tmp_path / "original", digest(root), digest)


@pytest.mark.parametrize(("kind", "options"), RECODED)
def test_the_workload_is_what_is_reported(kind: str, options: tuple[str, ...], changed: Changed, tmp_path: Path) -> None:
    _, out = changed(kind, *options, **({"width": 192} if kind == "v4.1-flash" else {}))
    job = Restoration(out, tmp_path / "original", Link.AUTO)
    seen: list[Event] = []
    done = job.run(seen.append)
    (work,) = job.workload()
    assert (work.bytes, work.count) == (sum(event.bytes for event in seen), sum(event.done for event in seen))
    assert done.digests


@pytest.mark.parametrize(("kind", "options"), [("v4-flash", FP8), ("v4-flash-fp8", AMD)])
def test_tensors_that_were_changed_are_counted(kind: str, options: tuple[str, ...], changed: Changed, tmp_path: Path) -> None:
    root, out = changed(kind, *options)
    done = Restoration(out, tmp_path / "original", Link.AUTO).run(lambda _: None)
    opened = [read_checkpoint(LocalFolder(folder)).checkpoint for folder in (root, out)]
    was, now = ({name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} for checkpoint in opened)
    assert done.tensors == len(was)
    assert done.recoded == sum(now[name] != was[name] for name in was) > 0
    assert done.unpadded == 0
