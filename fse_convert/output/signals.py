"""The signals that ask a program to stop, and who handles them for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[Mapping[int, Any]]:
    """Handle the signals that ask a program to stop; yield their handlers of before. Nothing on a thread that may handle none."""
    numbers = STOPPING if threading.current_thread() is threading.main_thread() else ()
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield before
    finally:
        for number, former in before.items():
            signal.signal(number, former)
