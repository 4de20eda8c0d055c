#!/usr/bin/env python3
"""Make a small checkpoint shaped like DeepSeek-V4.1-Flash, ask which servers fuse it, convert it, prove it, and restore it."""

import tempfile
from pathlib import Path

import fse_convert
from fse_convert.testing.checkpoints import make_checkpoint

with tempfile.TemporaryDirectory() as folder:
    checkpoint = make_checkpoint(Path(folder, "checkpoint"), "v4.1-flash", layers=2, experts=2, hidden=512, width=384)
    out = Path(folder, "out")

    fusing = [answer.name for answer in fse_convert.inspect(checkpoint).answers if answer.fused]
    print("fused as is:", *fusing)

    result = fse_convert.convert(checkpoint, out, fse_convert.Options(fse_convert.target("vllm-0.30")))
    print("width", result.plan.decision.source_width, "->", result.plan.decision.width)

    proof = fse_convert.verify(out, source=checkpoint)
    print("exit code of verify:", int(proof.exit_code))

    restored = fse_convert.restore(out, Path(folder, "original"))
    print("restored", restored.tensors, "tensors,", restored.unpadded, "of them padded")
