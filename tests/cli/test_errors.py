"""Errors that no other test makes: what is not installed, what the machine lacks, and odd checkpoints, configs and outputs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.conversion import ray as cluster
from fse_convert.conversion.run import Request, write_part
from fse_convert.errors import EnvironmentFailure
from fse_convert.output.copying import Link
from fse_convert.output.parts import Part
from fse_convert.plan.plan import Options
from fse_convert.servers.f32_scales import Scales, f32_block_scales
from fse_convert.servers.judge import judge
from fse_convert.servers.targets import find_target
from fse_convert.testing.memory import Model
from fse_convert.testing.patch import ShardPatch, drop, edit_config, find, rename
from fse_convert.verification.findings import Level

Make = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
EXPERTS = "layers.0.ffn.experts"
SHARED = "layers.0.ffn.shared_experts"
KNOBS = {"layers": 1, "experts": 1, "mtp": 0}


def conflicts(root: Path, run: Run) -> set[str]:
    found = json.loads(run("inspect", root, "--json")[1])
    return {c["code"] for c in (*found["problems"], *found["conflicts"])}


@pytest.mark.parametrize(
    ("package", "command", "code", "hint"),
    [
        ("huggingface_hub", ["inspect", "hf://a/b"], "hub-missing", "pip install 'huggingface_hub>=1.0'"),
        ("ray", ["{source}", "{out}", "--ray", "auto"], "no-ray", "pip install 'ray>=2.40'"),
    ],
)
def test_a_package_that_is_not_installed(
    package: str, command: list[str], code: str, hint: str, made: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run(*(word.format(source=made(**KNOBS), out=tmp_path / "out") for word in command))
    assert (status, f"error[{code}]" in err, hint in err) == (4, True, True)


def test_an_offline_hub(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status, _, err = run("inspect", "hf://a/b")
    assert (status, "error[hub-offline]" in err, "unset it" in err) == (4, True, True)


def test_no_address_of_a_cluster(made: Make, tmp_path: Path, run: Run) -> None:
    status, _, err = run(made(**KNOBS), tmp_path / "out", "--ray", "")
    assert (status, "error[ray-address]" in err) == (2, True)


def test_nobody_listens_at_the_address_of_a_cluster() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(EnvironmentFailure, match="no Ray cluster answers") as e:
        cluster.reach(address)
    assert e.value.problems[0].code == "no-cluster"


class TaskError(Exception):
    cause = ModuleNotFoundError("No module named 'fse_convert'")


class LostError(Exception):
    """Stands for Ray's own errors, such as that of a worker that died."""


@pytest.mark.parametrize(("raised", "code"), [(TaskError(), "node-lacks"), (LostError("the worker died"), "worker-lost")])
def test_what_goes_wrong_on_a_node(raised: Exception, code: str) -> None:
    def get(_: object) -> None:
        raise raised

    ray: Any = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayTaskError=TaskError, RayError=LostError))
    with pytest.raises(EnvironmentFailure) as e:
        cluster._result(ray, None)
    assert e.value.problems[0].code == code
    assert e.value.problems[0].hint


def test_a_node_that_sees_another_source(made: Make, source: Make, tmp_path: Path, run: Run) -> None:
    target = find_target("megamoe-512")
    assert target
    assert run(made(**KNOBS), tmp_path / "out", "--part", "1/2")[0] == 0
    root = source(**KNOBS)
    (root / "README.md").write_text("another one")
    request = Request(
        source=root, out=tmp_path / "out", options=Options(target), link=Link.AUTO, overwrite=False, verify=Level.NONE, workers=1
    )  # fmt: skip
    with pytest.raises(EnvironmentFailure, match="a node sees something else") as e:
        write_part(pickle.dumps(request), Part(index=2, count=2))
    assert e.value.problems[0].code == "node-differs"


def test_a_file_system_without_locks(made: Make, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    status, _, err = run(made(**KNOBS), tmp_path / "out")
    assert (status, "error[no-locks]" in err, "write the output to one that can" in err) == (4, True, True)


def test_a_shard_that_cannot_be_read(source: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = LocalFolder.read

    def read(folder: LocalFolder, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name.endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return real(folder, name, offset, length)

    monkeypatch.setattr(LocalFolder, "read", read)
    status, text, err = run("inspect", source(**KNOBS))
    assert status in (3, 4)
    assert "[unreadable]" in text + err or "[io-error]" in text + err


def test_a_model_without_shared_experts(source: Make, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", **KNOBS)
    drop(root, *(f"{SHARED}.{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight", "scale")))
    edit_config(root, lambda config: config.update(n_shared_experts=0))
    status, _, err = run(root, tmp_path / "out")
    assert (status, "error[no-shared-experts]" in err) == (3, True)
    assert "--tp N without --target pads for tensor parallelism alone" in err
    assert run(root, tmp_path / "out", "--tp", 2)[0] == 0


def test_layers_of_different_widths(source: Make, tmp_path: Path, run: Run) -> None:
    root = source("v4-flash", layers=2, experts=1, mtp=0)
    with ShardPatch(find(root, "layers.1.ffn.experts.0.w1.weight").path) as shard:
        for name, stored in shard.tensors.items():
            if name.startswith("layers.1.ffn.experts.0."):  # a third of the width: 128 of 384
                rows, columns = stored.shape
                shape = [rows, columns // 3] if ".w2." in name else [rows // 3, columns]
                shard.tensors[name] = stored._replace(shape=shape, data=stored.data[: len(stored.data) // 3])
    status, _, err = run(root, tmp_path / "out")
    assert (status, "error[widths-differ]" in err, "128, 384" in err) == (3, True, True)


@pytest.mark.parametrize(
    ("kind", "change", "code"),
    [
        ("v4-flash", lambda c: c.pop("quantization_config"), "quantization-missing"),
        ("v4-flash", lambda c: c.update(quantization_config=["fp8"]), "quantization-not-an-object"),
        ("v4-flash", lambda c: c["quantization_config"].update(ignored_layers=[SHARED]), "quantization-excluded"),
        (
            "bf16",
            lambda c: c.update(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "quantization-stale",
        ),
    ],
)
def test_a_config_that_contradicts_the_experts(
    kind: str, change: Callable[[dict[str, Any]], object], code: str, source: Make, run: Run
) -> None:
    root = source(kind, **KNOBS)
    assert code not in conflicts(root, run)
    edit_config(root, change)
    assert code in conflicts(root, run)


def test_scales_that_a_server_would_round() -> None:
    about = Model(shared="fp8-128-f32", config={"quantization_config": {"quant_method": "fp8"}}).subject()
    names = [t.name for d in about.description.layers for t in f32_block_scales(d.shared)]
    about = replace(about, scales=Scales(read=frozenset(names), inexact={names[0]: "scale 0 is 1.5"}))
    (answer,) = (a for a in judge(about) if a.name == "sglang-0.5.23")
    assert "scale-f32-rounded" in {r.code for r in (*answer.model.reasons, *answer.notes)}


def test_quark_that_leaves_shared_experts_out() -> None:
    quark = {"quant_method": "quark", "global_quant_config": {}, "exclude": ["layers.0.ffn.shared_experts"], "export": {}}
    about = Model(routed="mxfp4-u8", shared="fp8-32", config={"quantization_config": quark}).subject()
    (slots,) = (a for a in judge(about) if a.name == "sglang-0.5.23-slots")
    assert "slot-quant-differs" in {r.code for r in slots.model.reasons}


def test_deepseeks_rule_where_routed_experts_are_not_mxfp4() -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    about = Model(routed="fp8-128", shared="fp8-128", config={"expert_dtype": "fp8", "quantization_config": quantization}).subject()
    (answer,) = (a for a in judge(about) if a.name == "vllm-0.29-aiter")
    assert "aiter-deepseek-routed-not-mxfp4" in {r.code for r in answer.model.reasons}


def test_a_model_that_the_heterogeneous_kernel_is_not_built_for() -> None:
    answers = [a for a in judge(Model().subject()) if a.name.endswith("-fhmoe")]
    assert answers
    assert all("aiter-heterogeneous" in {n.code for n in a.notes} for a in answers)


def test_a_broken_checkpoint_gets_no_verdict(source: Make, run: Run) -> None:
    root = source(**KNOBS)
    next(root.glob("*.safetensors")).unlink()
    targets = json.loads(run("inspect", root, "--target", "megamoe-128", "--json")[1])["targets"]
    assert [(t["verdict"], {r["code"] for r in t["reasons"]}) for t in targets] == [("unknown", {"checkpoint-broken"})]


def test_a_tensor_too_many_is_a_mismatch(output: Make, made: Make, run: Run) -> None:
    out = output("megamoe-512", "v4.1-flash", "--verify", "storage", layers=1, experts=1)
    rename(out, f"{SHARED}.w1.scale", "layers.0.extra", keep=True)
    status, text, _ = run("verify", out, "--source", made(layers=1, experts=1), "--level", "storage")
    assert status == 1
    assert "mismatch[tensor-unexpected]: layers.0.extra" in text
