"""Hooks that refuse requests to a running SGLang which would read the weights that the plugin frees.

By then it is too late to refuse at start-up, as `fse_convert.serving.sglang.modes` does. Sources: paths below ``sglang/srt/`` of
release 0.5.23.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from fse_convert.serving.sglang.modules import KEEP, NAME, reason, sealed_modules
from fse_convert.serving.sidecar import refuse

logger = logging.getLogger(__name__)

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update"
CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
EXPORTER = "sglang.srt.model_executor.model_runner_components.weight_exporter.WeightExporter"
SAVES = ("save_remote_model", "save_sharded_model")
SENDS = ("init_weights_send_group_for_remote_instance", "send_weights_to_remote_instance")


def refuse_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Answer a session of weight updates with a refusal, before weights are unpacked in place for it. AROUND `UPDATER`."""
    runners = manager._select_runners(request.selector)
    if any(sealed_modules(runner.model) for _, runner in runners):
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

        return BeginWeightUpdateReqOutput(success=False, message=reason("online weight updates"))
    return original(manager, request)


def refuse_check(original: Callable[..., Any], checker: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse checksums, which would be over nothing, by a RuntimeError, which SGLang reports. AROUND `CHECKER`."""
    if sealed_modules(checker._get_model()):
        raise RuntimeError(reason("weight checks"))
    return original(checker, *args, **kwargs)


def _refuse_export(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Make a hook that answers for a 0.5.22 which would export what is freed, as 0.5.23 does. AROUND methods of `EXPORTER`."""

    def hook(original: Callable[..., Any], exporter: Any, *args: Any, **kwargs: Any) -> Any:
        return answer() if sealed_modules(exporter.get_model()) else original(exporter, *args, **kwargs)

    return hook


def _raise_reason() -> NoReturn:
    raise RuntimeError(reason("weight exports"))


refuse_save = _refuse_export(_raise_reason)
refuse_send = _refuse_export(lambda: (False, reason("transfers to other instances")))
refuse_get = _refuse_export(lambda: logger.error(reason("weight exports")))  # None stands for no weight


PROBE = object()
"""Passed to a hooked method in place of its object; only a guard returns it."""


def _probed(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def guarded(original: Callable[..., Any], subject: Any, *args: Any, **kwargs: Any) -> Any:
        return subject if subject is PROBE else hook(original, subject, *args, **kwargs)

    return guarded


def _guards() -> dict[str, Callable[..., Any]]:
    """Return the hooks, by target, that must be in place once anything is freed."""
    hooks: dict[str, Callable[..., Any]] = {UPDATER: refuse_update, CHECKER: refuse_check}
    if not hasattr(pkgutil.resolve_name(EXPORTER), "_weight_export_unsupported_reason"):  # it would read ``_weight_export_error``
        hooks |= {f"{EXPORTER}.{name}": refuse_save for name in SAVES}
        hooks |= {f"{EXPORTER}.{name}": refuse_send for name in SENDS}
        hooks[f"{EXPORTER}.get_weights_by_name"] = refuse_get
    return {target: _probed(hook) for target, hook in hooks.items()}


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
