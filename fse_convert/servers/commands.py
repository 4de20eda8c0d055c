"""The command that starts a server on an output; its flags and variables are those of the server's row."""

from __future__ import annotations

import re

from fse_convert.servers.judge import AnyTarget

COMMANDS = {
    "vLLM": "vllm serve {}",
    "vLLM ROCm": "vllm serve {}",
    "SGLang": "python -m sglang.launch_server --model-path {}",
}
"""How a server is started, by its engine."""
VARIABLES = "VLLM_ROCM_USE_AITER"
"""What ``...`` stands for in rows that list several variables."""


def serve_command(target: AnyTarget, place: str, *, kernel_layout: bool = True) -> str:
    """Return the command that serves an output in the folder ``place``; parallel sizes are left to whoever runs it.

    ``kernel_layout``: whether the output has one, which vLLM loads by a load format and SGLang's plugin finds by itself.
    Empty for a kernel contract, and for a server that is not started by one command.
    """
    if target.engine not in COMMANDS:
        return ""
    parts = re.split(r"[,;] ", target.started_with)
    variables = [part.replace("...", VARIABLES) for part in parts if re.fullmatch(r"[\w.]+=\S+", part)]
    load = ["--load-format fse"] if kernel_layout and target.engine == "vLLM" else []
    flags = [part for part in parts if part.startswith("--") and not part.endswith("*")]
    return " ".join((*variables, COMMANDS[target.engine].format(place), *load, *flags))
