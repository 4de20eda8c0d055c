"""Slices for the ranks of one server are told by their widths, whatever the files are called; copies are not slices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.names import INDEX
from fse_convert.checkpoint.reader import PartialCheckpoint, read_checkpoint
from fse_convert.testing.patch import ShardPatch, Stored, write_shard

Run = Callable[..., tuple[int, str, str]]
HIDDEN, WIDTH, EXPERTS = 64, 96, 2
CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS,
    "n_shared_experts": 1, "num_hidden_layers": 1, "intermediate_size": 2 * WIDTH,
}  # fmt: skip
NAMED = [
    "{}.safetensors", "tp_rank_{}.safetensors", "mp_rank_0{}_model_states.safetensors", "model_tp{}_of_2.safetensors",
    "model-0000{}-of-00002.safetensors", "weights.{}.safetensors",
]  # fmt: skip


def expert(width: int, dtype: str = "BF16") -> dict[str, Stored]:
    """One layer whose experts are so wide, one shared expert among them."""
    found = {}
    for module in ("experts.0", "experts.1", "shared_experts"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = [HIDDEN, width] if name == "down_proj" else [width, HIDDEN]
            found[f"model.layers.0.mlp.{module}.{name}.weight"] = Stored(
                dtype, shape, bytes(HIDDEN * width * (2 if dtype == "BF16" else 1))
            )
    return found


def save(root: Path, files: Mapping[str, Mapping[str, Stored]], **config: object) -> None:
    for name, tensors in files.items():
        write_shard(root / name, {}, b"")
        with ShardPatch(root / name) as shard:
            shard.tensors = dict(tensors)
    (root / "config.json").write_text(json.dumps({**CONFIG, **config}))


def codes(root: Path) -> list[str]:
    found: PartialCheckpoint = read_checkpoint(LocalFolder(root))
    return [p.code for p in found.problems]


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("index", [None, (0, 1), (1,)], ids=["no index", "both listed", "one listed"])
def test_slices_whatever_their_names(named: str, index: tuple[int, ...] | None, tmp_path: Path) -> None:
    files = {named.format(i): expert(WIDTH // 2) for i in (0, 1)}
    save(tmp_path, files)
    if index is not None:
        weight_map = {name: list(files)[index[k % len(index)]] for k, name in enumerate(expert(1))}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (problem,) = read_checkpoint(LocalFolder(tmp_path)).problems
    assert problem.code == "rank-slices"
    assert "2 of them" in problem.message
    assert problem.hint.startswith("keep them all: ")
    assert "copy" not in str(problem) + problem.hint


@pytest.mark.parametrize(
    ("config", "ranks"),
    [({"text_config": {"moe_intermediate_size": 192}, "moe_intermediate_size": None}, 4), ({"moe_intermediate_size": [144]}, 3)],
    ids=["in a section, four ranks", "in a list, three ranks"],
)
def test_the_width_wherever_the_config_states_it(config: dict[str, object], ranks: int, tmp_path: Path) -> None:
    save(tmp_path, {f"{i}.safetensors": expert(48) for i in range(ranks)}, intermediate_size=None, **config)
    assert codes(tmp_path) == ["rank-slices"]


def test_an_expert_as_wide_as_its_input(tmp_path: Path) -> None:
    save(tmp_path, {f"{i}.safetensors": expert(HIDDEN // 2) for i in (0, 1)}, moe_intermediate_size=HIDDEN)
    assert codes(tmp_path) == ["rank-slices"]


@pytest.mark.parametrize("width", [WIDTH, 40], ids=["whole", "of no width in the config"])
def test_copies_are_no_slices(width: int, tmp_path: Path) -> None:
    """A dense MLP that is twice as wide does not make halves of whole experts."""
    save(tmp_path, {f"{i}.safetensors": expert(width) for i in (0, 1)})
    assert codes(tmp_path) == ["file-missing", "tensor-duplicate"]


def test_packed_copies_are_no_slices(tmp_path: Path) -> None:
    save(tmp_path, {f"{i}.safetensors": expert(WIDTH // 2, "I8") for i in (0, 1)})
    assert codes(tmp_path) == ["file-missing", "tensor-duplicate"]


def test_inspect_says_so_alone(tmp_path: Path, run: Run) -> None:
    save(tmp_path, {f"{i}.safetensors": expert(WIDTH // 2) for i in (0, 1)})
    status, _, err = run("inspect", tmp_path)
    assert (status, err.count("error["), "error[rank-slices]" in err) == (3, 1, True)
