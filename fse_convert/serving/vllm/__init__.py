"""vLLM's ``--load-format fse``: the shared experts of ``OUT/fse`` go straight into the kernel's tensors.

The entry point ``fse`` of ``vllm.general_plugins`` is `register`; vLLM calls it in every process, whether or not the load
format is used. The loader itself is in `fse_convert.serving.vllm.loader`, which needs vLLM to be imported.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.plugins.fse_convert")  # below vLLM's own logger, whose handlers are there by now
LOAD_FORMAT = "fse"
MOVED = (ImportError, AttributeError, TypeError, ValueError)
"""What a moved API raises: names that are gone, and other arguments (vLLM refuses a class that is no loader by a ValueError)."""


def register() -> None:
    """Register the load format; may be called any number of times.

    In a vLLM that has moved what this needs, one warning and no load format: a plugin that raises ends every process of the
    server (0.33 plugins/__init__.py:90), whether or not the load format is asked for.
    Rule: vLLM 0.33 plugins/__init__.py:18 and model_executor/model_loader/__init__.py:66 (both the same since 0.29).
    """
    try:
        from vllm.model_executor import model_loader

        from fse_convert.serving.vllm.loader import FseModelLoader

        known = vars(model_loader).get("_LOAD_FORMAT_TO_MODEL_LOADER", {})
        if known.get(LOAD_FORMAT) is not FseModelLoader:  # a second registration would be warned of
            model_loader.register_model_loader(LOAD_FORMAT)(FseModelLoader)
    except MOVED as e:
        text = "this vLLM is not known to fse-convert; --load-format %s is not available (%s: %s)"
        logger.warning(text, LOAD_FORMAT, type(e).__name__, e)
