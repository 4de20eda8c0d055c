"""Checkpoints on the Hub: a local server that serves the Hub's own URLs stands for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.hub import HubFolder
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.errors import EnvironmentFailure, ExitCode, InvalidCheckpoint, UsageError
from tests.hub_server import COMMIT, Hub, serve

pytest.importorskip("huggingface_hub")
REPO = "deepseek-ai/DeepSeek-V4.1-Flash"


@pytest.fixture
def hub(made: Callable[..., Path]) -> Iterator[Hub]:
    with serve(REPO, made(engram_rows=64)) as running:
        yield running


def folder(hub: Hub, address: str = f"hf://{REPO}") -> HubFolder:
    return HubFolder(address, endpoint=hub.endpoint)


def test_the_same_checkpoint_as_on_disk(hub: Hub) -> None:
    remote, local = folder(hub), LocalFolder(hub.root)
    assert remote.files == local.files
    theirs, mine = read_checkpoint(remote), read_checkpoint(local)
    assert theirs.problems == mine.problems == ()
    assert theirs.checkpoint.tensors == mine.checkpoint.tensors
    assert theirs.checkpoint.config == mine.checkpoint.config


def test_headers_are_fetched_by_range_and_nothing_else(hub: Hub) -> None:
    before = hub.sent
    read_checkpoint(folder(hub))
    shards = [name for name in LocalFolder(hub.root).files if name.endswith(".safetensors")]
    payload = sum((hub.root / name).stat().st_size for name in shards)
    ranges = [r for path, r in hub.reads() if ".safetensors" in path and "index" not in path]
    assert ranges
    assert all(r.startswith("bytes=0-") for r in ranges)
    assert hub.sent - before < payload
    assert not any("README" in path or "encoding" in path for path, _ in hub.reads())


def test_every_request_is_of_one_commit(hub: Hub) -> None:
    read_checkpoint(folder(hub, f"hf://{REPO}@v1"))
    assert all(f"/resolve/{COMMIT}/" in path for path, _ in hub.reads() if "/resolve/" in path)
    assert any(path.startswith(f"/api/models/{REPO}/revision/v1") for _, path, _ in hub.requests)


def test_headers_are_read_several_at_a_time(hub: Hub) -> None:
    hub.together = 4
    read_checkpoint(folder(hub))
    assert hub.most_at_once >= 4


def test_a_read_is_cut_at_the_end_of_the_file(hub: Hub) -> None:
    remote, raw = folder(hub), (hub.root / "config.json").read_bytes()
    assert remote.read("config.json") == raw
    assert remote.read("config.json", 5, 7) == raw[5:12]
    assert remote.read("config.json", len(raw) - 3, 100) == raw[-3:]
    assert remote.read("config.json", len(raw), 100) == b""


def test_a_server_without_ranges_is_cut_off_or_refused(hub: Hub) -> None:
    hub.ranges = False
    remote = folder(hub)
    name = max(remote.files, key=remote.files.__getitem__)
    assert remote.read(name, 0, 16) == (hub.root / name).read_bytes()[:16]
    with pytest.raises(OSError, match="does not serve byte ranges"):
        remote.read(name, 16, 16)


def test_a_server_that_stumbles_is_asked_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    remote = folder(hub)
    hub.broken = 2
    assert remote.read("config.json") == (hub.root / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("address", "error", "code"),
    [
        ("hf://deepseek-ai/nothing", InvalidCheckpoint, "no-such-model"),
        (f"hf://{REPO}@nothing", InvalidCheckpoint, "no-such-revision"),
        ("hf://deepseek", UsageError, "hub-address"),
        ("hf://a/b/c", UsageError, "hub-address"),
        ("hf://a/b@", UsageError, "hub-address"),
        ("hf://../b", UsageError, "hub-address"),
    ],
)
def test_addresses_that_lead_nowhere(hub: Hub, address: str, error: type[Exception], code: str) -> None:
    with pytest.raises(error) as e:
        folder(hub, address)
    assert e.value.problems[0].code == code  # type: ignore[attr-defined]
    assert e.value.problems[0].hint  # type: ignore[attr-defined]


def test_gated_models_ask_for_access(hub: Hub) -> None:
    hub.gated = True
    with pytest.raises(EnvironmentFailure) as e:
        folder(hub)
    assert e.value.problems[0].code == "hub-gated"


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    with pytest.raises(EnvironmentFailure) as e:
        HubFolder(f"hf://{REPO}", endpoint="http://127.0.0.1:1")
    assert e.value.problems[0].code == "hub-unreachable"


def test_without_huggingface_hub_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentFailure) as e:
        HubFolder(f"hf://{REPO}")
    assert "fse-convert[hub]" in e.value.problems[0].hint


def _command(hub: Hub, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "fse_convert", "inspect", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_line_takes_the_endpoint_from_the_environment(hub: Hub) -> None:
    done = _command(hub, f"hf://{REPO}@main", "--json", "--require", "vllm-0.33")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    assert found["checkpoint"]["label"] == f"hf://{REPO}@main"
    assert found["family"] == "DeepSeek-V4"
    local = json.loads(_command(hub, str(hub.root), "--json").stdout)
    assert found["targets"] == local["targets"]
    assert found["layers"] == local["layers"]


def test_the_command_line_says_what_is_wrong_without_a_traceback(hub: Hub) -> None:
    done = _command(hub, "hf://deepseek-ai/nothing")
    assert done.returncode == ExitCode.INVALID
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
