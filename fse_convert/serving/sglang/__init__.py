"""SGLang plugin: shared experts from ``OUT/fse``, and no second copy of what MegaMoE runs.

Installed beside SGLang it loads by itself (entry point group ``sglang.srt.plugins``, of which ``SGLANG_PLUGINS`` picks);
``FSE_CONVERT_SGLANG=off`` leaves SGLang as it is. For layers that MegaMoE runs it

* takes the fused shared experts from ``fse/`` of the folder being served, where there is one, and lets SGLang make them elsewhere;
* frees the plain weights and scales of those shared experts, and the routed scales that the kernel has copies of;
* refuses the ways of running SGLang that would read what is freed, and says in one line per model what is fused.

Nothing here imports SGLang before SGLang calls `register`. Sources: paths below ``sglang/srt/`` of release 0.5.23.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fse_convert.checkpoint.names import INDEX, MANIFEST, SIDECAR
from fse_convert.errors import NotServable, Problem
from fse_convert.servers.targets import TARGETS, Target, find_target
from fse_convert.serving.sglang import modes, modules

if TYPE_CHECKING:
    from fse_convert.serving.sidecar import KernelShared, Sidecar

logger = logging.getLogger(__name__)

NAME = "fse-convert"
"""Of the plugin, in ``SGLANG_PLUGINS``, and of the distribution."""
OFF = frozenset({"off", "0", "false", "no"})
MEGA_MOE = "sglang.srt.layers.moe.mega_moe"
SHARED = f"{MEGA_MOE}.build_mega_moe_shared_weights"
ROUTED = f"{MEGA_MOE}.build_mega_moe_experts_weights"
LOADER = "sglang.srt.model_loader.loader"
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


state = State()


# Registration ----------------------------------------------------------------------------------------------------------------


def register() -> None:
    """Register the hooks; SGLang calls this in every process, before anything is loaded. All that is needed, or none.

    A builder that this release lacks is left out: 0.5.21 and earlier have no fused shared experts. Without the hooks that say what
    is being loaded nothing could be freed safely, and SGLang is left as it is.
    """
    if os.environ.get(modules.SWITCH, "").strip().lower() in OFF:
        logger.info("fse-convert: %s=%s, SGLang is left as it is", modules.SWITCH, os.environ[modules.SWITCH])
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    needed = {
        f"{LOADER}.get_model_loader": (after_get_model_loader, HookType.AFTER),
        f"{LOADER}.DefaultModelLoader._prepare_weights": (after_prepare_weights, HookType.AFTER),
        AFTER_LOAD: (after_load, HookType.AFTER),
    }
    builders = {SHARED: (around_shared, HookType.AROUND), ROUTED: (around_routed, HookType.AROUND)}
    missing = [target for target in (*needed, *builders) if not _exists(target)]
    for target in missing:
        logger.info("fse-convert: this SGLang has no %s", target)
    if needed.keys() & set(missing):
        logger.warning("fse-convert: this SGLang is not known, and left as it is: nothing is freed or taken from %s/", SIDECAR)
        return
    passed_over = getattr(HookRegistry, "_patched", ())  # by a plugin that applied hooks itself: SGLang does so once per target
    for target, (hook, kind) in (needed | builders).items():
        if target in missing:
            continue
        HookRegistry.register(target, hook, kind, source=HookSource(NAME, NAME))
        if target in passed_over:
            HookRegistry._apply_target(target, [(kind, hook, HookSource(NAME, NAME))])


def _exists(target: str) -> bool:
    parent, _, name = target.rpartition(".")
    try:
        return hasattr(pkgutil.resolve_name(parent), name)
    except Exception as e:  # noqa: BLE001 (a module of SGLang may fail at import in any way, without a GPU for one)
        logger.debug("fse-convert: %s: %r", target, e)
        return False


def guard() -> None:
    """Put the hooks of `sglang_modes.guards` in place; raises NotServable if SGLang does not take one, so that nothing is freed.

    They go around whatever is there: SGLang applies hooks to a target once, and another plugin may have been first (0.5.23
    plugins/hook_registry.py:176). Each is asked afterwards, since its being registered proves nothing.
    """
    if state.guarded:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    exporter = pkgutil.resolve_name(modes.EXPORTER)
    missing = []
    for target, hook in modes.guards(hasattr(exporter, "_weight_export_unsupported_reason")).items():
        try:
            HookRegistry._apply_target(target, [(HookType.AROUND, hook, HookSource(NAME, NAME))])
            in_place = modes.answers(target)
        except Exception as e:  # noqa: BLE001 (whatever it is, nothing may be freed)
            logger.debug("fse-convert: %s: %r", target, e)
            in_place = False
        if not in_place:
            missing.append(target)
    if missing:
        message = f"this SGLang does not let {', '.join(missing)} be hooked: requests that read freed weights could not be refused"
        raise NotServable(Problem("release-unknown", message, "fse-convert in SGLang", modules.KEEP))
    state.guarded = True


# What is being loaded, and from where ------------------------------------------------------------------------------------------


def after_get_model_loader(loader: Any, load_config: Any, model_config: Any = None) -> None:  # noqa: ARG001
    """AFTER ``get_model_loader``: note which model is being loaded, and how (model_loader/loader.py:4162)."""
    if model_config is None:
        return
    config = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    state.load = Load(str(model_config.model_path), type(loader).__name__, config)
    if not state.architectures:
        state.architectures = tuple(model_config.hf_config.architectures or ())


def after_prepare_weights(result: Any, _loader: Any, model_name_or_path: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER ``DefaultModelLoader._prepare_weights``: note the folder that a path or a hub id stands for (loader.py:480-601)."""
    state.folders[str(model_name_or_path)] = Path(result[0])


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
    from fse_convert.serving.sidecar import UNPROVED, open_sidecar

    if not (folder / MANIFEST).is_file():
        if not _has_remains(folder / SIDECAR):
            return None
        message = f"{SIDECAR}/ has shards or an index but no manifest: by a hub id SGLang fetches *.safetensors and little else"
        hint = f"fetch the whole repository first: hf download REPO --local-dir OUT, then --model-path OUT; {modules.KEEP}"
        raise NotServable(Problem("sidecar-incomplete", message, str(folder / SIDECAR), hint))
    try:
        sidecar = open_sidecar(folder, whole=whole)
    except NotServable as e:
        raise NotServable(*(replace(p, hint=f"{p.hint}; {modules.KEEP}".lstrip("; ")) for p in e.problems)) from e
    if not sidecar.proved:
        logger.warning("fse-convert: " + UNPROVED, folder)
    return sidecar if sidecar.layers else None  # none fits the kernel, by the manifest: what is lost was refused above


def _has_remains(sidecar: Path) -> bool:
    """Whether a folder without a manifest was ``fse/`` of an output."""
    return (sidecar / INDEX).is_file() or next(sidecar.glob("shared-*-of-*.safetensors"), None) is not None


# The kernel's weights ------------------------------------------------------------------------------------------------------------


def around_routed(original: Callable[..., Any], experts: Any) -> Any:
    """AROUND ``build_mega_moe_experts_weights``: free the routed scales of which it makes the kernel's copies.

    Called per layer after loading (layers/quantization/fp8.py:1892, 2232). Raises NotServable; see `permitted`.
    """
    result = original(experts)
    if modules.has_routed_copies(experts) and permitted():
        _count(modules.free_routed(experts))
    return result


def around_shared(original: Callable[..., Any], shared_experts: Any) -> Any:
    """AROUND ``build_mega_moe_shared_weights``: the same tuples, from ``fse/`` where there is one; then free the originals.

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
    """Whether weights may be freed for the model being loaded; puts the guards in place when they may.

    False, with one line in the log, for architectures that SGLang may run past MegaMoE on purpose. Raises NotServable for modes
    that read the originals (`sglang_modes.MODES`).
    """
    from sglang.srt.arg_groups.mega_moe_hook import MEGA_MOE_NO_FALLBACK_ARCHS

    if modes.may_fall_back(state.architectures, MEGA_MOE_NO_FALLBACK_ARCHS):
        _once("fse-convert: nothing is freed: SGLang may run %s past MegaMoE, with the original weights", state.architectures)
        return False
    modes.refuse(state.load.loader if state.load else "an unknown loader", config_leaf)
    guard()
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
    """The row of `TARGETS` for the SGLang that runs here; the newest one for a release that has no row yet."""
    from importlib.metadata import version

    release = re.match(r"\d+\.\d+\.\d+", version("sglang"))  # of 0.5.22rc1 and 0.5.22.dev3+g1234567 too
    return (find_target(f"sglang-{release.group()}") if release else None) or [t for t in TARGETS if t.engine == "SGLang"][-1]


# What it came to -----------------------------------------------------------------------------------------------------------------


def after_load(_result: Any, model: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `AFTER_LOAD`: say which layers are fused, which SGLang does not, and what was freed; let go of ``fse/``."""
    layers = modules.fused_layers(model)
    for sidecar in state.sidecars.values():
        if sidecar is not None:
            sidecar.close()
    if layers:
        report(layers, state.load)


def report(layers: Mapping[str, bool], load: Load | None) -> None:
    """Log one line: how many MoE layers have their shared experts fused, from where, and the bytes freed."""
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


_said: set[str] = set()


def _once(text: str, *args: object) -> None:
    if text not in _said:
        _said.add(text)
        logger.info(text, *args)
