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

LORA = "LoRA on experts reads their scales (lora/moe/quant_info.py:48)"
LOADERS = frozenset({"DefaultModelLoader", "DummyModelLoader"})
"""Loaders after which nothing reads the parameters again. The class counts: two others rewrite their ``--load-format`` to auto."""


def _is_set(value: Any, _leaf: Leaf) -> bool:
    return bool(value)


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode that reads the originals.

    ``leaf``: the configuration value that shows it, ``why`` it reads them, ``hit``: by which values it is on. ``instead``: what
    to set; the option can be left out if that is not given.
    """

    leaf: str
    why: str
    hit: Callable[[Any, Leaf], bool] = _is_set
    instead: str = ""

    @property
    def change(self) -> str:
        """What to change."""
        return self.instead or f"leave out --{self.leaf.replace('_', '-')}"


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
        "weight_cache_mode",
        "the IPC weight cache shares every named parameter (weight_cache/daemon.py:444, ipc_loader.py:411)",
        lambda v, _: v not in (None, "off"),
        "--weight-cache-mode off",
    ),
    Mode(
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "other instances copy this one's parameters (model_loader/remote_instance_weight_loader_utils.py:144)",
    ),
    Mode("modelexpress_config", "ModelExpress publishes this instance's parameters to others (model_loader/loader.py:3235)"),
    Mode(
        "checkpoint_engine_wait_weights_before_ready",
        "the checkpoint engine writes new weights over the loaded ones (an online weight update)",
    ),
    Mode("custom_weight_loader", "custom weight loaders serve online weight updates, as RL training does (weight_updater.py:379)"),
    Mode("rl_quant_profile", "FlashRL loads new weights over the old ones (model_loader/loader.py:1165)"),
    Mode(
        "enable_memory_saver",
        "weights that the memory saver releases come back only by an online weight update, as in RL training",
        lambda v, leaf: bool(v) and not leaf("enable_weights_cpu_backup"),
        "--enable-weights-cpu-backup, or leave out --enable-memory-saver",
    ),
    Mode("elastic_ep_backend", "elastic EP loads experts again after a rank is lost (eplb/eplb_manager.py:337-343)"),
    Mode("enable_lora", LORA),
    Mode("lora_paths", LORA),
    Mode(
        "startup_weight_load_mode",
        "the weights arrive after the kernel's copies are made (model_loader/loader.py, commit_model_weights)",
        lambda v, _: v not in (None, "serial"),
        "--startup-weight-load-mode serial",
    ),
    Mode(
        "model_path",
        f"with an instance connector SGLang does not check that batches stay below {CAP}; above it the unfused path reads the "
        "originals (arg_groups/mega_moe_hook.py:83)",
        lambda v, _: str(v).startswith("instance://"),
        "a local path or a hub id as --model-path",
    ),
    Mode(
        "disaggregation_mode",
        f"on decode nodes SGLang does not check prefill batches against {CAP}; above it the unfused path reads the originals "
        "(arg_groups/mega_moe_hook.py:181)",
        lambda v, _: v == "decode",
        "--disaggregation-mode null or prefill",
    ),
    Mode(
        "enable_dynamic_chunking",
        f"with pipeline parallelism and dynamic chunking SGLang does not check batches against {CAP}; above it the unfused path "
        "reads the originals (arg_groups/mega_moe_hook.py:185)",
        lambda v, leaf: bool(v) and (leaf("pp_size") or 1) > 1,
    ),
    Mode(
        "max_running_requests",
        f"that many requests per data-parallel rank, times the tokens of each per step, are more than {CAP}: SGLang runs such a "
        "decode batch without a CUDA graph on the unfused path, which reads the originals (layers/moe/mega_moe.py:192)",
        _above_cap,
        f"--max-running-requests lower, or {CAP} higher",
    ),
)


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
