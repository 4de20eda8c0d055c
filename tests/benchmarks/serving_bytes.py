"""Count the bytes of tensors in vLLM at V4.1's real layer shape, held after loading and at the peak: the table in docs/serving.md.

    python -m tests.benchmarks.serving_bytes [RELEASE ...]      default: 0.30 0.31 0.33

vLLM's own loader and model class run on a CPU, as in tests/peers/test_vllm_serving.py: three layers of hidden size 5120, width 2304
and 8 routed experts, V4.1 as text. Counted, not measured: every storage that a torch operation makes until it is freed
(tests/peers/drivers/vllm_driver.py, `Ledger`). Needs 5 GB of disk and the environment of the peers (`FSE_PEERS_VLLM`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.peers import vllm_cases
from tests.peers.vllm_cases import V4_1

SHAPE = {"hidden": 5120, "width": 2304, "experts": 8}
ROWS = {  # checkpoint of a row of the table: its name there, releases, and whether the plugin loads it too
    "": ("source 2304", ("0.30", "0.31", "0.33")),
    "all-512": ("padded 2560", ("0.30",)),
    "shared-512": ("--experts shared", ("0.30",)),
    "all-128": ("--target megamoe-128", ("0.31", "0.33")),
}
MIB = 1 << 20


def main() -> None:
    """Print the table."""
    releases = sys.argv[1:] or ["0.30", "0.31", "0.33"]
    print("| vLLM, checkpoint | fused | unmodified: held / peak MiB | `--load-format fse`: held / peak MiB |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        workshop = vllm_cases.Workshop(Path(folder), **SHAPE)
        for release in releases:
            outputs = [output for output, (_, known) in ROWS.items() if release in known]
            formats = [(output, how) for output in outputs for how in ("auto", "fse") if output or how == "auto"]
            answers = vllm_cases.run_driver(release, workshop, [V4_1(*pair) for pair in formats])["answers"]
            for output in outputs:
                cells = [answers.get(V4_1(output, how).id) for how in ("auto", "fse")]
                fused = [all(layer["kernel"] for layer in cell["layers"].values()) for cell in cells if cell and not cell["error"]]
                print(f"| {release}, {ROWS[output][0]} | {fused} | {' | '.join(map(_cell, cells))} |", flush=True)


def _cell(answer: vllm_cases.Answer | None) -> str:
    if answer is None:
        return ""
    return str(answer["text"]) if answer["error"] else f"{answer['held'] / MIB:.1f} / {answer['peak'] / MIB:.1f}"


if __name__ == "__main__":
    main()
