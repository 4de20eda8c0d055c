"""vLLM's ``--load-format fse``: the shared experts of ``OUT/fse`` go straight into the kernel's tensors.

The entry point ``fse`` of ``vllm.general_plugins`` is `register`; vLLM calls it in every process, whether or not the load
format is used. The loader itself is in `fse_convert.serving.vllm_loader`, which needs vLLM to be imported.
"""

from __future__ import annotations

LOAD_FORMAT = "fse"


def register() -> None:
    """Register the load format; may be called any number of times. Raises ImportError outside of vLLM.

    Rule: vLLM 0.33 plugins/__init__.py:18 and model_executor/model_loader/__init__.py:66 (both the same since 0.29).
    """
    from vllm.model_executor import model_loader

    from fse_convert.serving.vllm_loader import FseModelLoader

    known = vars(model_loader).get("_LOAD_FORMAT_TO_MODEL_LOADER", {})
    if known.get(LOAD_FORMAT) is not FseModelLoader:  # a second registration would be warned of
        model_loader.register_model_loader(LOAD_FORMAT)(FseModelLoader)
