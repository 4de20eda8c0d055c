"""Fetches the published wheels of our peers and keeps only the Python files that judge us.

Each wheel is downloaded by pip, so the index, proxy and certificates are those that pip is configured with. Nothing is
installed, and no code of the peers is in this repository. ``python tests/peers/wheels.py`` fetches all of them: about
700 MB are downloaded, less than 10 MB are kept.

``FSE_PEERS_DIR``: where the files are kept; ``.peers`` in the repository unless set.
``FSE_PEERS=off``: the tests skip themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STAMP = ".complete"
DOWNLOAD_SECONDS = 1800
# Wheels are asked for as CPython 3.11 on Linux x86-64 sees them, whatever runs the tests: only Python files are used.
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")
PYTHON = ("--implementation=cp", "--python-version=3.11", "--abi=cp311")


class PeerUnavailable(Exception):
    """A peer could be neither found in the cache nor downloaded."""


@dataclass(frozen=True)
class Peer:
    """A published package, and the patterns of its files that are wanted."""

    name: str
    version: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"


_SGL_DEEP_GEMM = ("deep_gemm/mega/*.py", "deep_gemm/utils/*.py")
_VLLM_DEEP_GEMM = ("vllm/third_party/deep_gemm/mega/*.py", "vllm/third_party/deep_gemm/utils/*.py")

SGL_DEEP_GEMM_0_1_7 = Peer("sgl-deep-gemm", "0.1.7", _SGL_DEEP_GEMM)
SGL_DEEP_GEMM_0_2_3 = Peer("sgl-deep-gemm", "0.2.3.post2", _SGL_DEEP_GEMM)
SGL_DEEP_GEMM_0_2_5 = Peer("sgl-deep-gemm", "0.2.5", _SGL_DEEP_GEMM)
VLLM_0_30 = Peer(
    "vllm",
    "0.30.0",
    ("vllm/models/deepseek_v4/nvidia/model.py", "vllm/model_executor/utils.py", *_VLLM_DEEP_GEMM),
)
VLLM_0_33 = Peer(
    "vllm",
    "0.33.0",
    (
        "vllm/model_executor/layers/fused_moe/deep_gemm_mega_moe.py",
        "vllm/model_executor/utils.py",
        *_VLLM_DEEP_GEMM,
    ),
)
SGLANG_0_5_23 = Peer(
    "sglang",
    "0.5.23",
    ("sglang/srt/layers/moe/mega_moe.py", "sglang/srt/layers/quantization/fp8_utils.py"),
)
TORCHAO_0_18 = Peer("torchao", "0.18.0", ("torchao/*.py", "torchao-*.dist-info/METADATA"))
PEERS = (SGL_DEEP_GEMM_0_1_7, SGL_DEEP_GEMM_0_2_3, SGL_DEEP_GEMM_0_2_5, SGLANG_0_5_23, TORCHAO_0_18, VLLM_0_30, VLLM_0_33)

_failed: dict[Peer, str] = {}


def cache_dir() -> Path:
    """Folder that holds one folder per peer."""
    return Path(os.environ.get("FSE_PEERS_DIR") or Path(__file__).parents[2] / ".peers").absolute()


def fetch(peer: Peer) -> Path:
    """Return the folder with the peer's files, laid out as in its wheel; download them first if they are not there.

    Any number of processes may call this at once. Raises PeerUnavailable, without a second try in the same process.
    """
    folder = cache_dir() / str(peer)
    if _complete(folder, peer):
        return folder
    if peer in _failed:
        raise PeerUnavailable(_failed[peer])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f"{peer}.lock")):
            if not _complete(folder, peer):
                _download(peer, folder)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, PeerUnavailable) as error:
        _failed[peer] = (
            f"cannot get {peer.name}=={peer.version}, whose published code judges this test: {error}\n"
            f"Run `python {Path(__file__).name}` in {Path(__file__).parent} where pip reaches a package index, or set "
            "FSE_PEERS_DIR to a folder filled that way. FSE_PEERS=off skips these tests."
        )
        raise PeerUnavailable(_failed[peer]) from None
    return folder


def _complete(folder: Path, peer: Peer) -> bool:
    try:
        return (folder / STAMP).read_text() == "\n".join(peer.members)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(peer: Peer, folder: Path) -> None:
    """Fill ``folder`` from the wheel, in a folder beside it that is renamed when it is complete; the lock is held."""
    partial = folder.with_name(f"{peer}.partial")
    for left_over in (partial, folder):
        shutil.rmtree(left_over, ignore_errors=True)
    partial.mkdir()
    try:
        wheel = _pip_download(peer, partial / "wheel")
        _unpack(wheel, peer.members, partial / "files")
        (partial / "files" / STAMP).write_text("\n".join(peer.members))
        (partial / "files").rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip_download(peer: Peer, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries=2",
        f"--dest={into}",
    ]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += [*PYTHON, f"{peer.name}=={peer.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS)
    wheels = list(into.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last_lines = "\n".join(result.stderr.strip().splitlines()[-4:])
        raise PeerUnavailable(f"pip download ended with {result.returncode}\n{last_lines}")
    return wheels[0]


def _unpack(wheel: Path, patterns: tuple[str, ...], into: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for pattern in patterns:
            wanted = fnmatch.filter(names, pattern)
            if not wanted:
                raise PeerUnavailable(f"{wheel.name} has no {pattern}")
            archive.extractall(into, wanted)


def main() -> int:
    """Fetch every peer; say where each one is."""
    try:
        for peer in PEERS:
            print(f"{peer}: {fetch(peer)}", flush=True)
    except PeerUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
