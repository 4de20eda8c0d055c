"""The loader behind vLLM's ``--load-format fse``; importable inside vLLM 0.29-0.33 only.

Everything but the shared experts loads as `DefaultModelLoader` loads it. In place of the shared experts' tensors the model is
given a `marker` each, and where it puts the marker, `fse_convert.serving.vllm.takeover` copies the kernel-layout tensors. So
vLLM itself maps checkpoint names to modules, for the model, for its MTP and DSpark drafts and for the multimodal wrapper alike.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from fse_convert.serving.sidecar import UNPROVED, Sidecar, locate, open_sidecar, refuse
from fse_convert.serving.vllm.takeover import WITHOUT, Takeover, find_blocks, marker
from fse_convert.sidecar.tensors import kernel_prefix

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = init_logger("vllm.plugins.fse_convert")
SHARED = re.compile(r"^(.+)\.shared_experts?\.")
GIB = 1 << 30


class FseModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads an output of fse-convert: the shared experts from ``fse/``, everything else as vLLM does.

    Raises NotServable, before any weight is read, when the sidecar does not fit the model or when the model would run its
    shared experts outside of the kernel; and after loading, when a layer did not get its tensors.
    """

    def __init__(self, load_config: Any) -> None:
        plain = copy.copy(load_config)
        plain.load_format = "safetensors"  # what `_prepare_weights` knows: vLLM 0.33 default_loader.py:150-197
        super().__init__(plain)
        self._takeover: Takeover | None = None

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load every weight of ``model``; see the class."""
        folder = locate(model_config.model, model_config.revision, self.load_config.download_dir)
        # A draft may be what has no sidecar: every refusal also says how to load without this plugin.
        sidecar = open_sidecar(folder, whole=Path(model_config.model).is_dir(), otherwise=WITHOUT)
        if not sidecar.proved:
            logger.warning(UNPROVED, folder)
        takeover = Takeover(sidecar, model, vllm.__version__)
        self._takeover = takeover
        try:
            with takeover, skipping(sidecar):
                super().load_weights(model, model_config)
            takeover.finish()
        finally:
            self._takeover = None
            sidecar.close()
        logger.info(
            "Shared experts of %d layers: %.2f GiB in kernel layout from %s/fse (%s, width %d); the originals were left out.",
            len(takeover.taken), takeover.nbytes / GIB, folder,
            sidecar.manifest.contract_name, sidecar.manifest.model.width.kernel,
        )  # fmt: skip

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield every checkpoint tensor, with markers for the shared experts that the sidecar holds.

        Also called by vLLM's reload of weights, without `load_weights`: then the standard layout is what is loaded, and
        releases that keep no place for it refuse.
        """
        takeover = self._takeover
        if takeover is None and any(block.slots and block.module.shared_experts is None for block in find_blocks(model)):
            message = "this release has no place left to reload shared experts into"
            refuse("reload-unsupported", message, model_config.model, "restart the server")
        for name, tensor in super().get_all_weights(model_config, model):
            prefix = taken_prefix(name, takeover.sidecar) if takeover else None
            yield name, tensor if prefix is None else marker(prefix)


def taken_prefix(name: str, sidecar: Sidecar) -> str | None:
    """Return the prefix of the sidecar's layer whose shared expert a checkpoint tensor belongs to; None for every other tensor."""
    match = SHARED.match(name)
    prefix = kernel_prefix(match[1]) if match else ""
    return prefix if prefix in sidecar.layers else None


@contextmanager
def skipping(sidecar: Sidecar) -> Iterator[None]:
    """Make vLLM's iterators yield markers without reading what they stand for.

    They open shards by the name ``safe_open`` of their module (0.33 model_loader/weight_utils.py, the same since 0.29). The eager
    and the multi-threaded strategy read whole files in other ways: there the originals are read and dropped.
    """
    original = getattr(weight_utils, "safe_open", None)
    if original is None:
        yield
        return
    weight_utils.safe_open = lambda *args, **kwargs: _Shard(original(*args, **kwargs), sidecar)
    try:
        yield
    finally:
        weight_utils.safe_open = original


class _Shard:
    """An open shard whose taken tensors are markers."""

    def __init__(self, shard: Any, sidecar: Sidecar) -> None:
        self._shard, self._sidecar = shard, sidecar

    def __enter__(self) -> _Shard:
        self._shard.__enter__()
        return self

    def __exit__(self, *exception: object) -> Any:
        return self._shard.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shard, name)

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor, or make its marker."""
        prefix = taken_prefix(name, self._sidecar)
        tensor: Tensor = self._shard.get_tensor(name) if prefix is None else marker(prefix)
        return tensor
