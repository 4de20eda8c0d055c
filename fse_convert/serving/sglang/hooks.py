"""What SGLang calls while a model is loaded: which model it is, the kernel's weights, and what came of it.

The hooks share one `State`. Sources: paths below ``sglang/srt/`` of release 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fse_convert.checkpoint.names import INDEX, MANIFEST, SIDECAR
from fse_convert.servers.release_names import for_version
from fse_convert.servers.targets import TARGETS, Target
from fse_convert.serving.sglang import guards, modes, modules
from fse_convert.serving.sglang.lost_scales import refuse_lost_scales
from fse_convert.serving.sidecar import UNPROVED, KernelShared, Sidecar, open_sidecar, refuse

logger = logging.getLogger(__name__)

MEGA_MOE = "sglang.srt.layers.moe.mega_moe"
SHARED = f"{MEGA_MOE}.build_mega_moe_shared_weights"
ROUTED = f"{MEGA_MOE}.build_mega_moe_experts_weights"
LOADER = "sglang.srt.model_loader.loader"
GET_LOADER = f"{LOADER}.get_model_loader"
PREPARE = f"{LOADER}.DefaultModelLoader._prepare_weights"
AFTER_LOAD = "sglang.srt.model_executor.model_runner_components.load_model_utils.maybe_precompile_model_kernels_after_loading"


@dataclass
class Load:
    """One model on its way into this process: the target, or a draft.

    ``loader``: class of its loader. ``freed`` in bytes. ``from_sidecar``: module prefixes whose shared experts came from ``fse/``.
    """

    path: str
    loader: str
    config: Any
    freed: int = 0
    from_sidecar: list[str] = field(default_factory=list)


@dataclass
class State:
    """What the plugin knows in this process. Models load one after the other, so the last one chosen is the one being built."""

    load: Load | None = None
    folders: dict[str, Path] = field(default_factory=dict)
    sidecars: dict[Path, Sidecar | None] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    guarded: bool = False
    fallback_logged: bool = False


state = State()


def after_get_model_loader(loader: Any, load_config: Any, model_config: Any = None) -> None:  # noqa: ARG001
    """Note which model is being loaded, and how. AFTER ``get_model_loader`` (model_loader/loader.py:4162)."""
    if model_config is None:
        return
    config = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    state.load = Load(str(model_config.model_path), type(loader).__name__, config)
    if not state.architectures:
        state.architectures = tuple(model_config.hf_config.architectures or ())


def after_prepare_weights(result: Any, _loader: Any, model_name_or_path: Any, *_args: Any, **_kwargs: Any) -> None:
    """Note the folder that a path or a hub id stands for. AFTER ``DefaultModelLoader._prepare_weights`` (loader.py:480-601).

    Raises NotServable for a checkpoint whose scales SGLang would drop.
    """
    folder = state.folders[str(model_name_or_path)] = Path(result[0])
    refuse_lost_scales(folder)


def find_sidecar(load: Load | None) -> Sidecar | None:
    """Open ``fse/`` of the folder that a model is loaded from; None when there is none, or no folder is read (dummy weights).

    Raises NotServable when it is there but incomplete, as after a download of the safetensors files alone, or damaged.
    """
    folder = state.folders.get(load.path) if load else None
    if load is None or folder is None:
        return None
    if folder not in state.sidecars:
        state.sidecars[folder] = _open(folder, whole=Path(load.path).is_dir())
    return state.sidecars[folder]


def _open(folder: Path, *, whole: bool) -> Sidecar | None:
    if not (folder / MANIFEST).is_file():
        if not ((folder / SIDECAR / INDEX).is_file() or any((folder / SIDECAR).glob("shared-*-of-*.safetensors"))):
            return None
        message = f"{SIDECAR}/ has shards or an index but no manifest: by a hub id SGLang fetches *.safetensors and little else"
        hint = f"fetch the whole repository first: hf download REPO --local-dir OUT, then --model-path OUT; {modules.KEEP}"
        refuse("sidecar-incomplete", message, folder / SIDECAR, hint)
    sidecar = open_sidecar(folder, whole=whole, otherwise=modules.KEEP)
    if not sidecar.proved:
        logger.warning("fse-convert: " + UNPROVED, folder)
    return sidecar if sidecar.layers else None  # none fits the kernel, by the manifest: what is lost was refused above


def around_routed(original: Callable[..., Any], experts: Any) -> Any:
    """Free the routed scales of which SGLang makes the kernel's copies. AROUND ``build_mega_moe_experts_weights``.

    Called per layer after loading (layers/quantization/fp8.py:1892, 2232). Raises NotServable; see `permitted`.
    """
    result = original(experts)
    if modules.has_routed_copies(experts) and permitted():
        _count(modules.free_routed(experts))
    return result


def around_shared(original: Callable[..., Any], shared_experts: Any) -> Any:
    """Make the kernel's weights, from ``fse/`` if there is one; free the originals. AROUND ``build_mega_moe_shared_weights``.

    Called once per fused layer when everything is loaded (models/deepseek_v4.py:5105-5110). Returns
    ``((l1_w, l1_sf), (l2_w, l2_sf))``: FP8 ``[2S, H]`` and ``[H, S]``, int32 ``[2S, H / 128]`` and ``[H, S / 128]``, both MN-major.
    Raises NotServable when ``fse/`` does not fit the model; see also `permitted`.
    """
    if not permitted():
        return original(shared_experts)
    load, prefix = state.load, shared_experts.gate_up_proj.prefix
    sidecar = find_sidecar(load)
    if sidecar is None or load is None:
        result = original(shared_experts)
    else:
        shared = take(sidecar, load.config, shared_experts)
        load.from_sidecar.append(prefix)
        result = ((shared.l1_weight, shared.l1_scale), (shared.l2_weight, shared.l2_scale))
    _count(modules.free_shared(shared_experts, [tensor for pair in result for tensor in pair]))
    return result


def take(sidecar: Sidecar, config: Any, shared_experts: Any) -> KernelShared:
    """Copy a layer from ``fse/`` to the device of the module, after checking that it is this model's and this layer's.

    Raises NotServable.
    """
    name = modules.checkpoint_prefix(shared_experts.gate_up_proj.prefix, sidecar.layers)
    target = server_target()
    sidecar.check(
        hidden=int(config.hidden_size),
        routed_width=int(config.moe_intermediate_size),
        n_shared=int(config.n_shared_experts),
        contract=target.contract,
        target=target.name,
    )
    modules.check_shapes(shared_experts, sidecar.hidden, sidecar.width, target.name)
    shared = modules.to_device(sidecar.tensors(name), shared_experts.gate_up_proj.weight.device)
    modules.check_contents(shared_experts, shared)
    return shared


def permitted() -> bool:
    """Decide whether weights may be freed for the model being loaded; put the guards in place when they may.

    False, with one line in the log, for architectures that SGLang may run past MegaMoE on purpose. Raises NotServable for modes
    that read the originals (`modes.MODES`).
    """
    from sglang.srt.arg_groups.mega_moe_hook import MEGA_MOE_NO_FALLBACK_ARCHS

    if modes.may_fall_back(state.architectures, MEGA_MOE_NO_FALLBACK_ARCHS):
        if not state.fallback_logged:
            text = "fse-convert: nothing is freed: SGLang may run %s past MegaMoE, with the original weights"
            logger.info(text, state.architectures)
            state.fallback_logged = True
        return False
    modes.refuse(state.load.loader if state.load else "an unknown loader", config_leaf)
    if not state.guarded:
        guards.install()
        state.guarded = True
    return True


def config_leaf(name: str) -> Any:
    """Read a value of the configuration in effect; None when this release has no such value (runtime_context.py:1119)."""
    from sglang.srt.runtime_context import get_context

    try:
        return get_context().config_leaf(name)
    except ValueError as e:
        if "no namespace" in str(e):
            return None
        raise


def server_target() -> Target:
    """Find the row of the targets for the SGLang that runs here."""
    from importlib.metadata import version

    return for_version("SGLang", version("sglang"), TARGETS)


def after_load(_result: Any, model: Any, *_args: Any, **_kwargs: Any) -> None:
    """Log how many MoE layers are fused, from where, and the bytes freed; close ``fse/``. AFTER `AFTER_LOAD`."""
    layers, load = modules.fused_layers(model), state.load
    for sidecar in state.sidecars.values():
        if sidecar is not None:
            sidecar.close()
    if not layers:
        return
    fused = sum(layers.values())
    freed = (load.freed if load else 0) / 2**30
    taken = len(load.from_sidecar) if load else 0
    text = "fse-convert: shared experts run inside MegaMoE in %d of %d MoE layers, %d of them from %s/; %.2f GiB freed"
    if fused == len(layers):
        logger.info(text, fused, len(layers), taken, SIDECAR, freed)
    else:
        text += "; the others run unfused: see fse-convert inspect CHECKPOINT --target %s, and " + modules.FUSE
        logger.warning(text, fused, len(layers), taken, SIDECAR, freed, server_target().name)


def _count(freed: int) -> None:
    if state.load:
        state.load.freed += freed
