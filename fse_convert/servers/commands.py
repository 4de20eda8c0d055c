"""The command that starts a server on an output; its flags and variables are those of the server's row."""

from __future__ import annotations

import re

from fse_convert.servers.judge import Answer, AnyTarget

COMMANDS = {
    "vLLM": "vllm serve {} --tensor-parallel-size {}",
    "vLLM ROCm": "vllm serve {}",
    "SGLang": "python -m sglang.launch_server --model-path {} --tp {}",
}
"""How a server is started, by its engine, on so many ranks; rows of vLLM on ROCm ask for different parallel sizes."""
NODE = 8
"""GPUs of the node that a command is for where nobody said on how many the model is served."""
V41, V41_AS_TEXT = "deepseek_v41", "V4.1 as text: "
"""A model type, and what precedes the flag that one row has for it."""
VARIABLES = "VLLM_ROCM_USE_AITER"
"""What ``...`` stands for in rows that list several variables."""


def serve_command(target: AnyTarget | Answer, place: str, model_type: str, *, fse: bool, tp: int = 1) -> str:
    """Return the command that starts a server on a converted checkpoint; empty for a contract, and where none is known.

    ``target``: a row, or its answer with the flags that this checkpoint needs. ``place``: its folder, quoted for a shell, or a
    model of the Hub. ``fse``: whether it has the kernel layout, for which vLLM has a load format; SGLang's plugin finds it by
    itself. ``tp``: the tensor-parallel size, 1 if not said.
    """
    if target.engine not in COMMANDS:
        return ""
    parts = re.split(r"[,;] ", target.started_with)
    if model_type == V41:
        parts = [part.removeprefix(V41_AS_TEXT) for part in parts]
    variables = [part.replace("...", VARIABLES) for part in parts if re.fullmatch(r"[\w.]+=\S+", part)]
    load = ["--load-format fse"] if fse and target.engine == "vLLM" else []
    flags = [part for part in parts if part.startswith("--") and not part.endswith("*")]
    return " ".join((*variables, COMMANDS[target.engine].format(place, tp if tp > 1 else NODE), *load, *flags))
