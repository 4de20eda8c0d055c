"""The command that starts a server on an output; its flags and variables are those of the server's row."""

from __future__ import annotations

import re

from fse_convert.servers.judge import Answer, AnyTarget

COMMANDS = {
    "vLLM": "vllm serve {} --tensor-parallel-size {}",
    "vLLM ROCm": "vllm serve {}",
    "SGLang": "python -m sglang.launch_server --model-path {} --tp {}",
}
"""How a server is started, by its engine, on so many ranks; vLLM on ROCm only where its row or the model asks for a size."""
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
    size, sizes = tp if tp > 1 else NODE, tensor_parallel_sizes(target.started_with)
    size = max(sizes) if sizes and size not in sizes else size
    ranks = [f"--tensor-parallel-size {size}"] if target.engine == "vLLM ROCm" and sizes and size > 1 else []
    variables = [part.replace("...", VARIABLES) for part in parts if re.fullmatch(r"[\w.]+=\S+", part)]
    load = ["--load-format fse"] if fse and target.engine == "vLLM" else []
    flags = [part for part in parts if part.startswith("--") and not part.endswith("*")]
    return " ".join((*variables, COMMANDS[target.engine].format(place, size), *ranks, *load, *flags))


def tensor_parallel_sizes(started_with: str) -> tuple[int, ...]:
    """Return the tensor-parallel sizes that a server's flags and conditions allow; empty for any."""
    asked = re.search(r"(?:^|, )(?:TP|tensor parallel size) (\d+(?: or \d+)*)", started_with)
    return tuple(map(int, asked[1].split(" or "))) if asked else ()
