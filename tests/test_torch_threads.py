"""torch with memory that it gets back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, torch
from fse_convert.torch_threads import one_torch_thread

def chunk():
    tensors = [torch.zeros(1 << 21, dtype=torch.uint8) for _ in range(5)]

with one_torch_thread():
    for _ in range(4):
        chunk()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        chunk()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_tensors_of_the_next_chunk_get_the_memory_of_the_last() -> None:
    """In a fresh process: what others have freed before decides what glibc keeps."""
    pages = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    assert int(pages) < 500  # a chunk has 2560
