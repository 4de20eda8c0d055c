"""Hooks that refuse requests to a running SGLang which would read the weights that the plugin frees.

By then it is too late to refuse at start-up, as `fse_convert.serving.sglang.modes` does. Sources: paths below ``sglang/srt/`` of
release 0.5.23.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from fse_convert.serving.sglang.modules import KEEP, NAME, reason, sealed_modules
from fse_convert.serving.sidecar import refuse

logger = logging.getLogger(__name__)

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update"
CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
EXPORTER = "sglang.srt.model_executor.model_runner_components.weight_exporter.WeightExporter"
SAVES = ("save_remote_model", "save_sharded_model")
SENDS = ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance")


PROBE = object()
"""Passed to a hooked method in place of its object; only a guard returns it."""


def _guard(models: Callable[..., Iterable[Any]], answer: Callable[[], Any]) -> Callable[..., Any]:
    """Make an AROUND hook that answers itself where one of the subject's models has freed modules."""

    def guarded(original: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
        if subject is PROBE:
            return subject
        freed = any(sealed_modules(model) for model in models(subject, *args))
        return answer() if freed else original(subject, *args, **kwargs)

    return guarded


def _refused_update() -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    return BeginWeightUpdateReqOutput(success=False, message=reason("online weight updates"))


def _raise(what: str) -> NoReturn:
    raise RuntimeError(reason(what))


def _exported(exporter: Any, *_: Any) -> list[Any]:
    return [exporter.get_model()]


refuse_update = _guard(lambda manager, request: [r.model for _, r in manager._select_runners(request.selector)], _refused_update)
"""Answers a session of weight updates, before weights are unpacked in place for it."""
refuse_check = _guard(lambda checker, *_: [checker._get_model()], partial(_raise, "weight checks"))
"""Refuses checksums, which would be over nothing, by an error that SGLang reports."""
refuse_save = _guard(_exported, partial(_raise, "weight exports"))
refuse_send = _guard(_exported, lambda: (False, reason("transfers to other instances")))
refuse_get = _guard(_exported, lambda: logger.error(reason("weight exports")))  # None stands for no weight


def _guards() -> dict[str, Callable[..., Any]]:
    """Return the hooks, by target, that must be in place once anything is freed."""
    hooks = {UPDATER: refuse_update, CHECKER: refuse_check}
    # A 0.5.22 would export what is freed; where this is there, 0.5.23 reads ``_weight_export_error``.
    if not hasattr(pkgutil.resolve_name(EXPORTER), "_weight_export_unsupported_reason"):
        hooks |= {f"{EXPORTER}.{name}": refuse_save for name in SAVES}
        hooks |= {f"{EXPORTER}.{name}": refuse_send for name in SENDS}
        hooks[f"{EXPORTER}.get_weights_by_name"] = refuse_get
    return hooks


def install() -> None:
    """Put all guards in place. Raises NotServable if SGLang does not take one, so that nothing is freed.

    They go around whatever is there: SGLang applies hooks to a target once, and another plugin may have been first (0.5.23
    plugins/hook_registry.py:176). Each is called afterwards, with `PROBE`: that it is registered proves nothing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    missing = []
    for target, hook in _guards().items():
        try:
            HookRegistry._apply_target(target, [(HookType.AROUND, hook, HookSource(NAME, NAME))])
            in_place = pkgutil.resolve_name(target)(PROBE) is PROBE
        except Exception as e:  # noqa: BLE001 (whatever it is, nothing may be freed)
            logger.debug("fse-convert: %s: %r", target, e)
            in_place = False
        if not in_place:
            missing.append(target)
    if missing:
        message = f"this SGLang does not let {', '.join(missing)} be hooked: requests that read freed weights could not be refused"
        refuse("release-unknown", message, "fse-convert in SGLang", KEEP)
