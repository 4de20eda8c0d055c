"""The SGLang plugin inside SGLang's own code: real plugin loading, loaders, model classes and forward, on a CPU.

SGLang 0.5.23 runs in an environment of its own, built by `make_env.py` when it is missing; `FSE_PEERS_SGLANG` names it, by default
`.peers/sglang` in the repository. Earlier releases run in the same environment, from the Python files of their wheels.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fse_convert.testing.checkpoints import make_checkpoint
from tests.peers import vllm_cases, wheels
from tests.peers.sglang_run import REPOSITORY, SGLANG_0_5_21, SGLANG_0_5_22, locked, once, published, run_driver

pytestmark = pytest.mark.peers

HIDDEN, WIDTH, LAYERS, EXPERTS = 512, 640, 2, 4
SIZES = {"hidden": HIDDEN, "width": WIDTH, "layers": LAYERS, "experts": EXPERTS, "vocab": 128}
KINDS: dict[str, dict[str, Any]] = {
    "v4.1": {"kind": "v4.1-flash", "mtp": 2, "mtp_experts": 2, "engram_rows": 64},
    "v4": {"kind": "v4-flash", "mtp": 1, "o_lora_rank": 128, "num_hash_layers": 0},  # its hash router is a compiled kernel
}
FREED = {
    *(f"shared_experts.{linear}.{kind}" for linear in ("gate_up_proj", "down_proj") for kind in ("weight", "weight_scale_inv")),
    "experts.w13_weight_scale_inv",
    "experts.w2_weight_scale_inv",
}
HOOKS = "sglang.srt.layers.moe.mega_moe.build_mega_moe_"

Answer = dict[str, Any]


@pytest.fixture(scope="session")
def checkpoint(work: Path) -> Callable[..., Path]:
    """Make a checkpoint, or its conversion for a target; both once."""

    def make(name: str, target: str = "") -> Path:
        folder = work / (f"{name}-{target}" if target else name)
        with locked(folder):
            if not folder.exists() and not target:
                make_checkpoint(work / f"{name}.new", **SIZES, **KINDS[name]).rename(folder)
            elif not folder.exists():
                command = [sys.executable, "-m", "fse_convert", str(make(name)), str(folder), "--target", target]
                done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
                assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return make


def entry_points(group: str) -> str:
    """A group of entry points out of pyproject.toml, as the installed package's metadata has it."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n((?:.+\n)+)', text, re.MULTILINE)
    assert section is not None, group
    return f"[{group}]\n" + section[1].replace('"', "")


@pytest.fixture(scope="session")
def site(work: Path) -> Path:
    """A folder with the metadata of the installed package: SGLang finds the plugin by it."""
    info = work / "site" / "fse_convert-0.dist-info"
    with locked(work / "site"):
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fse-convert\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points("sglang.srt.plugins"), encoding="utf-8")
    return vllm_cases.dependencies(info.parent)


@pytest.fixture(scope="session")
def ask(work: Path, site: Path) -> Callable[..., Answer]:
    """Run a driver in SGLang's environment, once per set of arguments."""

    def run(driver: str, *arguments: object, release: wheels.Peer | None = None, **variables: str) -> Answer:
        name = "-".join([driver, *(Path(str(a)).name for a in arguments), release.version if release else "", *variables.values()])
        path = [*([published(release)] if release else []), REPOSITORY, variables.pop("site", site)]
        answer = work / (re.sub(r"[^\w.-]+", "_", name) + ".json")
        return once(answer, lambda: run_driver(driver, *arguments, folder=work, path=path, **variables))

    return run


CASES = {  # name of the case: checkpoint, target, draft, release
    "v4.1": ("v4.1", "sglang-0.5.23", "dspark", None),
    "v4": ("v4", "megamoe-512", "nextn", None),
    "v4 in 0.5.22": ("v4", "megamoe-512", "nextn", SGLANG_0_5_22),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def answer(case: str, checkpoint: Callable[..., Path], ask: Callable[..., Answer]) -> Answer:
    name, target, draft, release = CASES[case]
    source = ["--source", checkpoint(name)] if case == "v4.1" else []
    return ask("sglang_driver", checkpoint(name, target), "--draft", draft, *source, release=release)


def test_sglang_finds_the_plugin_and_patches_every_target(answer: Answer) -> None:
    assert answer["not_patched"] == [], "SGLang only logs it when a plugin fails"


def test_every_fused_layer_of_target_and_draft_comes_from_the_sidecar(answer: Answer, case: str) -> None:
    draft = {"v4.1": ["stages.0", "stages.1"]}.get(case, ["model.decoder"])
    layers = ["model.layers.0", "model.layers.1", *draft]
    assert answer["prefixes"] == [f"{layer}.mlp.shared_experts.gate_up_proj" for layer in layers]
    text = "INFO fse-convert: shared experts run inside MegaMoE in {0} of {0} MoE layers, {0} of them from fse/; 0.00 GiB freed"
    assert answer["log"] == [text.format(LAYERS), text.format(len(draft))]


def test_the_kernel_gets_the_tensors_of_unmodified_sglang(answer: Answer, case: str) -> None:
    width = WIDTH if case == "v4.1" else 1024
    shapes = [[2 * width, HIDDEN], [2 * width, HIDDEN // 128], [HIDDEN, width], [HIDDEN, width // 128]]
    strides = [[HIDDEN, 1], [1, 2 * width], [width, 1], [1, HIDDEN]]
    for name, tensors in answer["tensors"].items():
        assert [t["shape"] for t in tensors] == shapes, name
        assert [t["stride"] for t in tensors] == strides, name
        assert all(t["same_kind"] for t in tensors), "dtype, shape, strides, device"
        if case == "v4.1":  # 32x32 blocks: SGLang leaves them as they are
            assert all(t["same_bytes"] for t in tensors), name
        else:  # 128x128 blocks: SGLang requantises them, which changes the scales of the padding
            assert [t["same_bytes"] for t in tensors] == [True, False, True, False], name
    assert answer["value_error"] == 0


def test_128x128_blocks_differ_from_sglang_by_its_requantisation_alone(answer: Answer, case: str) -> None:
    if case == "v4.1":
        assert answer["block"] == [32, 32]
    else:
        assert answer["block"] == [128, 128]
        assert list(answer["requantised"].values()) == [True, True]


def test_the_real_forward_hands_exactly_these_to_the_kernel(answer: Answer, case: str) -> None:
    expected = {"same_tensors": True, "num_shared": 1}
    assert answer["calls"] == [expected] * len(answer["prefixes"])


def test_what_is_freed_and_how_many_bytes(answer: Answer, case: str) -> None:
    routed = "0.5.22" not in case  # there EPLB would move the scales and leave the kernel's copies behind
    assert set(answer["freed"]) == {name for name in FREED if routed or name.startswith("shared_experts")}
    width = WIDTH if case == "v4.1" else 1024
    l1 = 2 * width * HIDDEN
    scales = 4 * 3 * width * HIDDEN // 1024 if case == "v4.1" else (2 * width * HIDDEN + HIDDEN * width) // 128
    copies = l1 + scales + (EXPERTS * 3 * width * HIDDEN // 32 if routed else 0)
    sizes = answer["bytes"]
    assert sizes["stock"]["held"] - sizes["plugin"]["held"] == LAYERS * copies
    assert sizes["plugin"]["read"] == sizes["stock"]["read"], "the originals are read and held until they are freed"
    for kind in ("peak routed", "peak shared"):
        assert sizes["plugin"][kind] <= sizes["stock"][kind]
    print(json.dumps({case: sizes}, indent=1))


def test_eplb_moves_what_the_kernel_reads(answer: Answer, case: str) -> None:
    live = ["mega_w13_weight_scale_utccp", "mega_w2_weight_scale_utccp", "w13_weight", "w2_weight"]
    dead = ["w13_weight_scale_inv", "w2_weight_scale_inv"]
    if "0.5.22" in case:
        assert answer["eplb"]["plugin"] == answer["eplb"]["stock"] == [sorted([*live[2:], *dead])] * LAYERS
    else:
        assert answer["eplb"] == {"stock": [sorted([*live, *dead])] * LAYERS, "plugin": [live] * LAYERS}


def test_no_converted_checkpoint_is_needed_to_free_the_copies(checkpoint: Callable[..., Path], ask: Callable[..., Answer]) -> None:
    name, target, draft, _ = CASES["v4.1"]
    answer = ask("sglang_driver", checkpoint(name, target), "--draft", draft, "--source", checkpoint(name))
    plain = answer["no_sidecar"]
    assert set(plain["freed"]) == FREED
    assert plain["bytes"]["held"] == answer["bytes"]["plugin"]["held"]
    assert all(t["same_bytes"] and t["same_kind"] for tensors in plain["tensors"].values() for t in tensors)
    assert "2 of 2 MoE layers, 0 of them from fse/" in plain["log"]


def test_modes_that_read_the_originals_are_refused_one_by_one(answer: Answer) -> None:
    assert len(answer["refusals"]) == 21
    for mode, (kind, text) in answer["refusals"].items():
        assert kind == "NotServable", mode
        assert "FSE_CONVERT_SGLANG=off" in text, mode


def test_a_batch_above_the_cap_names_the_variable(answer: Answer) -> None:
    kind, text = answer["over_cap"]
    assert kind == "RuntimeError"
    assert "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK (1)" in text


def test_requests_that_read_the_originals_are_answered_with_a_refusal(answer: Answer) -> None:
    requests = answer["requests"]
    assert requests.pop("get_weights_by_name") == ["returned", "NoneType"], (
        "SGLang's answer for what it cannot export; the log says why"
    )
    for name, (kind, text) in requests.items():
        assert kind is False or kind == "RuntimeError", name
        assert "FSE_CONVERT_SGLANG=off" in text, name


def test_sglang_reads_the_standard_shards_alone(answer: Answer, checkpoint: Callable[..., Path], case: str) -> None:
    out = checkpoint(*CASES[case][:2])
    files = answer["files"]
    assert files["folder_is_out"]
    assert files["files"] == sorted(p.name for p in out.glob("*.safetensors"))
    assert files["kernel_names"] == []
    weights = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert files["tensors"] == len(weights)


def test_pointed_at_the_kernel_layout_sglang_refuses(answer: Answer) -> None:
    kind, text = answer["files"]["pointed_at_fse"]
    assert kind in {"ValueError", "OSError"}
    assert "/fse" in text
    assert "config.json" in text


def test_the_plugin_loads_in_a_bare_process_without_cuda(ask: Callable[..., Answer]) -> None:
    answer = ask("sglang_plugins", SGLANG_PLUGINS="fse-convert")
    assert {f"{HOOKS}shared_weights", f"{HOOKS}experts_weights"} <= set(answer["patched"])
    assert answer["registered"] == answer["patched"]
    assert not answer["cuda"]


def test_fse_with_a_config_beside_it_is_no_checkpoint(
    checkpoint: Callable[..., Path], ask: Callable[..., Answer], work: Path
) -> None:
    """SGLang only warns of tensors that it does not know: the tripwire in ``fse/`` stops it all the same."""
    out, alone = checkpoint("v4.1", "sglang-0.5.23"), work / "alone"
    with locked(alone):
        if not alone.exists():
            shutil.copytree(out / "fse", alone)
            shutil.copy(out / "config.json", alone)
    answer = ask("sglang_driver", alone, "--load-only")
    for (loaded,) in (answer["stock"], answer["plugin"]):
        assert "loaded_weight.shape[output_dim]=0" in loaded["error"]


@pytest.mark.parametrize("variables", [{"SGLANG_PLUGINS": "another"}, {"FSE_CONVERT_SGLANG": "off"}], ids=str)
def test_left_out_or_switched_off_it_costs_nothing(ask: Callable[..., Answer], variables: dict[str, str]) -> None:
    answer = ask("sglang_plugins", **variables)
    assert answer["registered"] == answer["patched"] == []
    assert not answer["imported"], "not even SGLang's own modules"


def test_a_plugin_that_fails_is_seen(ask: Callable[..., Answer], tmp_path: Path) -> None:
    info = tmp_path / "fse_convert-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fse-convert\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nfse-convert = fse_convert.serving.sglang:nothing\n", encoding="utf-8"
    )
    assert ask("sglang_plugins", site=str(tmp_path))["patched"] == [], "SGLang logs the failure and starts without it"


def test_0_5_22_does_not_fuse_32x32_blocks_and_the_log_says_so(checkpoint: Callable[..., Path], ask: Callable[..., Answer]) -> None:
    answer = ask("sglang_driver", checkpoint("v4.1", "sglang-0.5.23"), "--load-only", release=SGLANG_0_5_22)
    assert answer["not_patched"] == []
    assert answer["stock"] == answer["plugin"]
    assert answer["plugin"][0]["fused"] == [False, False]
    assert answer["plugin"][0]["freed"] == []
    assert answer["log"][0].startswith("WARNING fse-convert: shared experts run inside MegaMoE in 0 of 2 MoE layers")
    assert "--target sglang-0.5.22" in answer["log"][0]


def test_0_5_21_takes_the_padded_checkpoint_alone_and_the_plugin_changes_nothing(
    checkpoint: Callable[..., Path], ask: Callable[..., Answer]
) -> None:
    folders = (checkpoint("v4.1", "sglang-0.5.23"), checkpoint("v4.1", "megamoe-512"))
    text_only = ("--override", '{"vision_n_layers": 0}')  # its vision tower allows no MegaMoE
    answer = ask("sglang_driver", *folders, "--load-only", *text_only, release=SGLANG_0_5_21)
    assert answer["not_patched"] == [f"{HOOKS}shared_weights"], "this release has no fused shared experts"
    assert answer["stock"] == answer["plugin"]
    native, padded = answer["stock"]
    assert "multiples of 512; got hidden_size=512, moe_intermediate_size=640" in native["error"]
    assert padded["fused"] == [False, False]
