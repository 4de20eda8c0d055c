from __future__ import annotations

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("peers") and os.environ.get("FSE_PEERS", "").lower() == "off":
        pytest.skip("FSE_PEERS=off")
