from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests share modules, and --import-mode=importlib adds no folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("peers") and os.environ.get("FSE_PEERS", "").lower() == "off":
        pytest.skip("FSE_PEERS=off")
