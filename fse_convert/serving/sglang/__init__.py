"""SGLang plugin: shared experts from ``OUT/fse``, and no second copy of what MegaMoE runs.

Installed beside SGLang it loads by itself (entry point group ``sglang.srt.plugins``, of which ``SGLANG_PLUGINS`` picks);
``FSE_CONVERT_SGLANG=off`` leaves SGLang as it is. For layers that MegaMoE runs it

* takes the fused shared experts from ``fse/`` of the folder being served, where there is one, and lets SGLang make them elsewhere;
* frees the plain weights and scales of those shared experts, and the routed scales that the kernel has copies of;
* refuses checkpoints whose scales SGLang drops in silence (`lost_scales`), whatever runs them;
* refuses the ways of running SGLang that would read what is freed, and says in one line per model what is fused.

`hooks` are what SGLang calls; `modes` and `guards` say what would read freed weights, at start-up and by a request; `modules`
compares and frees. Nothing here imports SGLang before SGLang calls `register`, or torch before a model is loaded. Sources: paths
below ``sglang/srt/`` of release 0.5.23.
"""

from __future__ import annotations

import logging
import os
import pkgutil

from fse_convert.checkpoint.names import SIDECAR
from fse_convert.serving.sglang import hooks
from fse_convert.serving.sglang.modules import NAME, SWITCH

logger = logging.getLogger(__name__)

OFF = frozenset({"off", "0", "false", "no"})


def register() -> None:
    """Register the hooks; SGLang calls this in every process, before anything is loaded.

    A builder that this release lacks is left out: 0.5.21 and earlier have no fused shared experts. Without the hooks that tell
    what is being loaded nothing could be freed safely: then none is registered, and SGLang is left as it is.
    """
    if os.environ.get(SWITCH, "").strip().lower() in OFF:
        logger.info("fse-convert: %s=%s, SGLang is left as it is", SWITCH, os.environ[SWITCH])
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    needed = {
        hooks.GET_LOADER: (hooks.after_get_model_loader, HookType.AFTER),
        hooks.PREPARE: (hooks.after_prepare_weights, HookType.AFTER),
        hooks.AFTER_LOAD: (hooks.after_load, HookType.AFTER),
    }
    builders = {hooks.SHARED: (hooks.around_shared, HookType.AROUND), hooks.ROUTED: (hooks.around_routed, HookType.AROUND)}
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
