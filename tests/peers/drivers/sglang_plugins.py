"""Lets SGLang find and load its plugins in a bare process, and prints which hooks it has, and applied, as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

_library = torch.library.Library("torchvision", "DEF")  # its wheel's operators are compiled for CUDA
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> int:
    sys.stdout = sys.stderr
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = set(sys.modules)
    start = time.perf_counter()
    load_plugins()
    answer = {
        "registered": sorted(HookRegistry._hooks),
        "patched": sorted(HookRegistry._patched),
        "seconds": time.perf_counter() - start,
        "cuda": torch.cuda.is_initialized(),
        "imported": "sglang.srt.layers.moe.mega_moe" in set(sys.modules) - before,
    }
    os.write(1, ("\n@@@" + json.dumps(answer) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
