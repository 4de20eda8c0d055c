"""The command that starts a server on an output; its flags are those of the server's row."""

from __future__ import annotations

import re

from fse_convert.servers.targets import Target

COMMANDS = {"vLLM": "vllm serve {} --load-format fse", "SGLang": "python -m sglang.launch_server --model-path {}"}
"""How a server is started where fse-convert is installed beside it; SGLang finds the plugin by itself."""


def serve_command(target: Target, place: str) -> str:
    """Return the command that serves an output in the folder ``place``; parallel sizes are left to whoever runs it.

    Empty for a kernel contract, and for a server that is not started by one command.
    """
    flags = [part for part in re.split(r"[,;] ", target.started_with) if part.startswith("--")]
    return " ".join((COMMANDS[target.engine].format(place), *flags)) if target.engine in COMMANDS else ""
