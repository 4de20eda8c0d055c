"""The memory allocator as torch needs it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fse_convert.torch_threads import KEPT, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory

if TYPE_CHECKING:
    import pytest


def test_glibc_keeps_what_tensors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=told.__setitem__))
    keep_freed_memory()
    assert told == {M_TRIM_THRESHOLD: KEPT, M_MMAP_THRESHOLD: KEPT}


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    keep_freed_memory()
