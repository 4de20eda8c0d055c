"""The manifest: read to typed records and written to the same bytes, whatever somebody put into it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.errors import FseConvertError
from fse_convert.sidecar.manifest import DIGEST, ChangeRecord, Manifest, own_digest, read_manifest, sealed

Value = dict[str, Any]


def read(out: Path) -> Manifest:
    return read_manifest(LocalFolder(out))


def rewrite(out: Path, change: Callable[[Value], object]) -> None:
    """Change the manifest and make its digest again, as an editor would."""
    path = out / "fse/manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(encode_json({**value, DIGEST: own_digest(value)}))


def refusal(out: Path) -> tuple[str, str]:
    with pytest.raises(FseConvertError) as error:
        read(out)
    (problem,) = error.value.problems
    return problem.code, problem.message


def test_what_is_read_is_written_to_the_same_bytes(converted: Path) -> None:
    assert sealed(read(converted)) == (converted / "fse/manifest.json").read_bytes()


def test_layers_in_kernel_layout(converted: Path) -> None:
    manifest = read(converted)
    assert manifest.kernel_prefixes == ["layers.0.ffn.experts", "mtp.0.ffn.experts"]
    assert manifest.model.shared_kernel_width == manifest.model.width.kernel == 512


@pytest.mark.parametrize(
    ("change", "path"),
    [
        pytest.param(lambda m: m["model"]["width"].update(kernel=float("inf")), "$.model.width.kernel", id="infinity"),
        pytest.param(lambda m: m["model"]["width"].update(kernel=float("nan")), "$.model.width.kernel", id="nan"),
        pytest.param(lambda m: m["model"]["width"].update(main=512.0), "$.model.width.main", id="512.0"),
        pytest.param(lambda m: m["model"].update(n_shared_experts=True), "$.model.n_shared_experts", id="true"),
        pytest.param(lambda m: m["files"]["config.json"].update(size="1"), "$.files[...].size", id="a text for a number"),
        pytest.param(lambda m: m["padded"].update({"x": [-1]}), "$.padded[...]", id="a negative size"),
        pytest.param(lambda m: m["arguments"].update(tp=0), "$.arguments.tp", id="tp 0"),
        pytest.param(lambda m: m["arguments"].update(allow_unfused=1), "$.arguments.allow_unfused", id="1 for true"),
        pytest.param(lambda m: m["source"]["files"].clear(), "$.source", id="no digest of config.json"),
        pytest.param(lambda m: m["source"].update(originals={"x": "\ud800"}), "$.source", id="half a character to restore"),
        pytest.param(lambda m: m["layers"].append({"name": "x"}), "$.layers[2]", id="half a layer"),
        pytest.param(lambda m: m.pop("server"), "`server`", id="a key that is not there"),
        pytest.param(lambda m: m.update(files=None), "`files` and `tensors`", id="tensors without files"),
        pytest.param(lambda m: m.update(format_version=True), "True, expected 1", id="version true"),
        pytest.param(lambda m: m.update(format_version=1.0), "1.0, expected 1", id="version 1.0"),
        pytest.param(lambda m: m.update(format_version=0), "0, expected 1", id="version 0"),
        pytest.param(lambda m: m.update({"\ud800": 1}), "\\ud800", id="half a character for a key"),
    ],
)
def test_other_types_are_told_with_their_place(out: Path, change: Callable[[Value], object], path: str) -> None:
    rewrite(out, change)
    code, message = refusal(out)
    assert code == "manifest-damaged"
    assert path in message


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.update(unknown={"a": [1e400]}), id="an unknown key"),
        pytest.param(lambda m: m["model"].update(unknown=1), id="an unknown key inside"),
        pytest.param(lambda m: m["model"].update(family="\ud800"), id="half a character"),
        pytest.param(lambda m: m["padded"].update({"\ud800": [10**30]}), id="half a character, a huge number"),
        pytest.param(lambda m: m["proof"]["storage"].update(bytes=float("nan")), id="nan in the proof"),
    ],
)
def test_what_a_reader_does_not_need_does_not_stop_it(out: Path, change: Callable[[Value], object]) -> None:
    rewrite(out, change)
    assert read(out).model.width.kernel == 512


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"\xff", id="no UTF-8"),
        pytest.param(b'{"a":' * 100_000, id="endless nesting"),
        pytest.param(b'{"x": ' + b'{"a":' * 900 + b"1" + b"}" * 901, id="deep nesting"),
        pytest.param(b'{"a": ' + b"1" * 5000 + b"}", id="a number of 5000 digits"),
    ],
)
def test_bytes_that_are_no_manifest(out: Path, text: bytes) -> None:
    (out / "fse/manifest.json").write_bytes(text)
    assert refusal(out)[0] == "manifest-damaged"


def test_other_bytes_of_the_same_content_are_damaged(out: Path) -> None:
    path = out / "fse/manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert refusal(out)[0] == "manifest-damaged"


def test_an_edit_without_a_digest_is_damaged(out: Path) -> None:
    path = out / "fse/manifest.json"
    path.write_text(path.read_text().replace('"kernel": 512', '"kernel": 640'))
    code, message = refusal(out)
    assert code == "manifest-damaged"
    assert DIGEST in message


def test_a_newer_format_and_no_output_at_all(out: Path) -> None:
    rewrite(out, lambda m: m.update(format_version=3))
    assert refusal(out)[0] == "format-newer"
    (out / "fse/manifest.json").unlink()
    assert refusal(out)[0] == "not-an-output"


def changed(value: Value) -> None:
    """Make of a manifest one of version 2, as a conversion without a kernel layout writes it."""
    value.update(format_version=2, contract=None, layout=None)
    value["arguments"].update(target="", routed_fp8=True)
    keys = {"changes": [{"name": "routed-fp8", "lossless": True}], "renamed": {"new": "old"}}
    following = {key: value.pop(key) for key in list(value)[list(value).index("layers") :]}
    value.update({**keys, **following})


def test_what_changed_is_read_and_written_to_the_same_bytes(out: Path) -> None:
    rewrite(out, changed)
    manifest = read(out)
    assert sealed(manifest) == (out / "fse/manifest.json").read_bytes()
    assert manifest.changes == [ChangeRecord(name="routed-fp8", lossless=True)]
    assert manifest.renamed == {"new": "old"}
    assert (manifest.arguments.routed_fp8, manifest.arguments.lossy) == (True, UNSET)
    assert (manifest.contract_name, manifest.kernel_prefixes) == ("", []), "fused by a server of another kind"


def test_version_1_has_no_key_of_version_2(converted: Path) -> None:
    value = json.loads((converted / "fse/manifest.json").read_text())
    assert value["format_version"] == 1
    assert not {"changes", "renamed"} & value.keys()
    assert list(value["arguments"]) == ["target", "experts", "tp", "allow_unfused"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        pytest.param(lambda m: m["changes"][0].pop("lossless"), "$.changes[0]", id="half a change"),
        pytest.param(lambda m: m["changes"][0].update(lossless=1), "$.changes[0].lossless", id="1 for true"),
        pytest.param(lambda m: m.update(changes=None), "$.changes", id="changes null"),
        pytest.param(lambda m: m.update(renamed={"new": None}), "$.renamed[...]", id="a name that is null"),
        pytest.param(lambda m: m["arguments"].update(lossy="yes"), "$.arguments.lossy", id="a text for true"),
        pytest.param(lambda m: m.update(contract={}), "$.contract", id="half a contract"),
        pytest.param(lambda m: m.pop("layout"), "`layout`", id="a layout that is neither there nor null"),
    ],
)
def test_other_types_of_version_2_are_told_with_their_place(out: Path, change: Callable[[Value], object], path: str) -> None:
    rewrite(out, changed)
    rewrite(out, change)
    code, message = refusal(out)
    assert code == "manifest-damaged"
    assert path in message
