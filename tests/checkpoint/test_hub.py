"""Checkpoints on the Hub: a local server that serves the Hub's own URLs stands for it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fse_convert
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.hub import HubFolder, fetch, source_name
from fse_convert.checkpoint.reader import read_checkpoint
from fse_convert.errors import EnvironmentFailure, InvalidCheckpoint, UsageError
from fse_convert.exit_codes import ExitCode
from tests.hub_server import COMMIT, Hub, serve, stand_in

pytest.importorskip("huggingface_hub")
Run = Callable[..., tuple[int, str, str]]
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
    assert "huggingface_hub" in e.value.problems[0].hint


def _command(hub: Hub, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "fse_convert", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_line_takes_the_endpoint_from_the_environment(hub: Hub) -> None:
    done = _command(hub, "inspect", f"hf://{REPO}@main", "--json", "--require", "vllm-0.33")
    assert done.returncode == ExitCode.OK, done.stderr
    found = json.loads(done.stdout)
    assert found["checkpoint"]["label"] == f"hf://{REPO}@{COMMIT}"
    assert found["advice"]["command"].startswith(f"fse-convert hf://{REPO}@{COMMIT} DeepSeek-V4.1-Flash-megamoe-512 --target ")
    assert found["family"] == "DeepSeek-V4"
    local = json.loads(_command(hub, "inspect", str(hub.root), "--json").stdout)
    assert found["targets"] == local["targets"]
    assert found["layers"] == local["layers"]


def test_a_process_of_its_own_downloads(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    done = _command(hub, "convert", f"hf://{REPO}", str(tmp_path / "out"), "--dry-run", "--log-json", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(done.stdout)["source"] == f"hf://{REPO}@{COMMIT}"
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [e["event"] for e in events[:2]] == ["fetch", "source"]


def test_the_command_line_says_what_is_wrong_without_a_traceback(hub: Hub) -> None:
    done = _command(hub, "inspect", "hf://deepseek-ai/nothing")
    assert done.returncode == ExitCode.INVALID
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and the Hub itself, for this process."""
    stand_in(hub, tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"


def test_a_conversion_of_a_model_on_the_hub_is_that_of_its_folder(
    hub: Hub, cache: Path, run: Run, tmp_path: Path, digest: Callable[[Path], dict[str, str]]
) -> None:
    address = f"hf://{REPO}@v1"
    code, out, err = run(address, tmp_path / "out", "--target", "vllm-0.30", "--json", "-q")
    assert (code, err) == (ExitCode.OK, "")
    assert json.loads(out)["source"] == f"hf://{REPO}@{COMMIT}"
    assert run(hub.root, tmp_path / "local", "--target", "vllm-0.30", "-q")[0] == ExitCode.OK
    assert digest(tmp_path / "out") == digest(tmp_path / "local")

    sent = hub.sent
    code, out, err = run("verify", tmp_path / "out", "--source", address, "--json")
    assert code == ExitCode.OK, err
    assert json.loads(out)["source"] == f"hf://{REPO}@{COMMIT}"
    assert hub.sent == sent, "what lies in the cache was fetched again"
    assert f"source: hf://{REPO}@{COMMIT} in {cache}" in err


def test_the_cache_is_enough_where_the_hub_cannot_be_reached(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = fetch(f"hf://{REPO}")
    assert source_name(folder) == f"hf://{REPO}@{COMMIT}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(f"hf://{REPO}") == folder
    with pytest.raises(EnvironmentFailure) as e:
        fetch(f"hf://{REPO}@never-seen")
    assert e.value.problems[0].code == "hub-unreachable"
    assert "\n" not in e.value.problems[0].message, "an error is three lines at most"


@pytest.mark.parametrize(
    ("address", "code"), [("hf://deepseek-ai/nothing", "no-such-model"), (f"hf://{REPO}@nothing", "no-such-revision")]
)
@pytest.mark.parametrize("command", ["convert", "verify"])
def test_a_source_that_is_not_there(command: str, address: str, code: str, cache: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    got, _, err = run(*(("convert", address, out) if command == "convert" else ("verify", out, "--source", address)))
    assert got == ExitCode.INVALID
    assert f"error[{code}]" in err


def test_a_gate_is_told_what_the_hub_says(hub: Hub, cache: Path, run: Run) -> None:
    hub.gated = True
    code, out, _ = run("inspect", f"hf://{REPO}", "--format", "github")
    assert code == ExitCode.ENVIRONMENT
    assert out.startswith(f"::error title=hub-gated::hf://{REPO}: access to this model must be asked for -> accept the licence")
    assert "\n## fse-convert failed\n" in out


def test_a_full_disk_is_not_taken_for_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_args: object, **_kwargs: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(EnvironmentFailure) as e:
        fetch(f"hf://{REPO}")
    assert e.value.problems[0].code == "no-space"


def test_the_api_takes_addresses_too(hub: Hub, cache: Path, tmp_path: Path) -> None:
    fse_convert.convert(f"hf://{REPO}", tmp_path / "out", level=fse_convert.Level.STORAGE)
    assert fse_convert.verify(tmp_path / "out", f"hf://{REPO}", level=fse_convert.Level.STORAGE).exit_code == ExitCode.OK


def test_an_output_on_the_hub_is_downloaded_first(cache: Path, run: Run) -> None:
    code, _, err = run("verify", "hf://me/out")
    assert code == ExitCode.INVALID
    assert "hf download me/out --local-dir FOLDER" in err


@pytest.mark.parametrize(
    "path", ["/models/out", "/cache/models--a--b/snapshots/main", "/cache/models--a--b/snapshots/" + COMMIT + "/x"]
)
def test_a_folder_outside_of_the_cache_is_named_by_its_path(path: str) -> None:
    assert source_name(Path(path)) == path
