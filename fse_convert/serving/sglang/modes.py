"""The ways of running SGLang that read the weights which the plugin frees, as data, and how they are recognised.

`refuse` runs before anything is freed; `fse_convert.serving.sglang.guards` refuse requests later. Sources: paths below
``sglang/srt/`` of release 0.5.23. To add a mode, add a row to `MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fse_convert.errors import NotServable, Problem
from fse_convert.serving.sglang.modules import CAP, KEEP

Leaf = Callable[[str], Any]
"""Reads one value of SGLang's resolved configuration by its flat name; None when the release has no such value."""

LOADERS = frozenset({"DefaultModelLoader", "DummyModelLoader"})
"""Loaders after which nothing reads the parameters again. The class counts: two others rewrite their ``--load-format`` to auto."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode that reads the originals.

    ``leaf``: the configuration value that shows it, ``hit``: by which values. ``why`` it reads them, and what to ``change``.
    """

    leaf: str
    hit: Callable[[Any, Leaf], bool]
    why: str
    change: str


def _is_set(value: Any, _leaf: Leaf) -> bool:
    return bool(value)


def _above_cap(requests: Any, leaf: Leaf) -> bool:
    """Tell whether the decode batches that the configuration allows can be larger than MegaMoE takes, per rank.

    SGLang itself looks at the batches that it has CUDA graphs for (arg_groups/mega_moe_hook.py:102, 169); larger ones run without
    a graph, and above the cap past MegaMoE (layers/moe/mega_moe.py:192). Prefill nodes decode nothing.
    """
    if requests is None or leaf("disaggregation_mode") == "prefill":
        return False
    from sglang.srt.environ import envs

    tokens = (leaf("speculative_num_draft_tokens") or 1) if leaf("speculative_algorithm") else 1
    per_rank = max(1, requests // (leaf("attn_dp_size") or 1))  # model_executor/pool_configurator.py:1141
    return bool(per_rank * tokens > getattr(envs, CAP).get())


MODES: tuple[Mode, ...] = (
    Mode(
        "weight_cache_mode", lambda v, _: v not in (None, "off"),
        "the IPC weight cache shares every named parameter (weight_cache/daemon.py:444, ipc_loader.py:411)",
        "--weight-cache-mode off",
    ),
    Mode(
        "remote_instance_weight_loader_start_seed_via_transfer_engine", _is_set,
        "other instances copy this one's parameters (model_loader/remote_instance_weight_loader_utils.py:144)",
        "leave out --remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    Mode(
        "modelexpress_config", _is_set,
        "ModelExpress publishes this instance's parameters to others (model_loader/loader.py:3235)",
        "leave out --modelexpress-config",
    ),
    Mode(
        "checkpoint_engine_wait_weights_before_ready", _is_set,
        "the checkpoint engine writes new weights over the loaded ones (an online weight update)",
        "leave out --checkpoint-engine-wait-weights-before-ready",
    ),
    Mode(
        "custom_weight_loader", _is_set,
        "custom weight loaders serve online weight updates, as RL training does (weight_updater.py:379)",
        "leave out --custom-weight-loader",
    ),
    Mode(
        "rl_quant_profile", _is_set,
        "FlashRL loads new weights over the old ones (model_loader/loader.py:1165)",
        "leave out --rl-quant-profile",
    ),
    Mode(
        "enable_memory_saver", lambda v, leaf: bool(v) and not leaf("enable_weights_cpu_backup"),
        "weights that the memory saver releases come back only by an online weight update, as in RL training",
        "--enable-weights-cpu-backup, or leave out --enable-memory-saver",
    ),
    Mode(
        "elastic_ep_backend", _is_set,
        "elastic EP loads experts again after a rank is lost (eplb/eplb_manager.py:337-343)",
        "leave out --elastic-ep-backend",
    ),
    Mode(
        "enable_lora", _is_set,
        "LoRA on experts reads their scales (lora/moe/quant_info.py:48)",
        "leave out --enable-lora",
    ),
    Mode(
        "lora_paths", _is_set,
        "LoRA on experts reads their scales (lora/moe/quant_info.py:48)",
        "leave out --lora-paths",
    ),
    Mode(
        "startup_weight_load_mode", lambda v, _: v not in (None, "serial"),
        "the weights arrive after the kernel's copies are made (model_loader/loader.py, commit_model_weights)",
        "--startup-weight-load-mode serial",
    ),
    Mode(
        "model_path", lambda v, _: str(v).startswith("instance://"),
        f"with an instance connector SGLang does not check that batches stay below {CAP}; above it the unfused path reads the "
        "originals (arg_groups/mega_moe_hook.py:83)",
        "a local path or a hub id as --model-path",
    ),
    Mode(
        "disaggregation_mode", lambda v, _: v == "decode",
        f"on decode nodes SGLang does not check prefill batches against {CAP}; above it the unfused path reads the originals "
        "(arg_groups/mega_moe_hook.py:181)",
        "--disaggregation-mode null or prefill",
    ),
    Mode(
        "enable_dynamic_chunking", lambda v, leaf: bool(v) and (leaf("pp_size") or 1) > 1,
        f"with pipeline parallelism and dynamic chunking SGLang does not check batches against {CAP}; above it the unfused path "
        "reads the originals (arg_groups/mega_moe_hook.py:185)",
        "leave out --enable-dynamic-chunking",
    ),
    Mode(
        "max_running_requests", _above_cap,
        f"that many requests per data-parallel rank, times the tokens of each per step, are more than {CAP}: SGLang runs such a "
        "decode batch without a CUDA graph on the unfused path, which reads the originals (layers/moe/mega_moe.py:192)",
        f"--max-running-requests lower, or {CAP} higher",
    ),
)  # fmt: skip


def refuse(loader: str, leaf: Leaf) -> None:
    """Refuse, with every reason, to free weights that this server will read again.

    ``loader``: class of the loader of this model; a draft may have its own. Raises NotServable naming what to change.
    """
    problems = []
    if loader not in LOADERS:
        message = f"{loader} reads, writes or shares the parameters after loading (model_loader/loader.py:4162)"
        problems.append(_problem(message, "--load-format auto, for the draft model too"))
    for mode in MODES:
        value = leaf(mode.leaf)
        if mode.hit(value, leaf):
            problems.append(_problem(f"{mode.leaf} is {value!r}: {mode.why}", mode.change))
    if problems:
        raise NotServable(*problems)


def _problem(message: str, change: str) -> Problem:
    return Problem("needs-originals", message, "fse-convert in SGLang", f"{change}; {KEEP}")


def may_fall_back(architectures: Iterable[str], without_fallback: Iterable[str]) -> bool:
    """Tell whether SGLang may run this model past MegaMoE on purpose, so that its originals must stay.

    ``without_fallback``: the architectures whose batches it checks at start-up (arg_groups/mega_moe_hook.py:52).
    """
    return not set(architectures) & set(without_fallback)
