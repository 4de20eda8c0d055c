"""The command that starts a server has the flags of the server's row, and only those."""

from __future__ import annotations

import pytest

from fse_convert.servers.commands import serve_command
from fse_convert.servers.targets import TARGETS, find_target

VLLM = "vllm serve out --load-format fse --moe-backend deep_gemm_mega_moe --enable-expert-parallel"
SGLANG = "python -m sglang.launch_server --model-path out --moe-a2a-backend megamoe"
COMMANDS = {"vLLM": VLLM, "SGLang": SGLANG}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_target(target: object) -> None:
    row = find_target(getattr(target, "name", ""))
    assert row
    assert serve_command(row, "out") == COMMANDS.get(row.engine, "")
