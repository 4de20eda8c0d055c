from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peers import make_env, wheels


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("peers") and os.environ.get("FSE_PEERS", "").lower() == "off":
        pytest.skip("FSE_PEERS=off")


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of vLLM's environment, built first where it is missing (about two minutes)."""
    return make_env.ensure("vllm", Path(os.environ.get("FSE_PEERS_VLLM") or wheels.cache_dir() / "vllm"))
