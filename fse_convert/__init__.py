"""Rewrite a MoE checkpoint once, offline, so that servers run its shared experts fused, and prove the result.

The names of ``__all__`` are the Python API, documented in docs/api.md; everything else is private. They are loaded when
they are first used: importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fse_convert.api import *

__version__ = "0.1.0"
__all__ = [
    "Conversion",
    "ConversionResult",
    "Experts",
    "FseConvertError",
    "Inspection",
    "Level",
    "Link",
    "Options",
    "Part",
    "Problem",
    "Proof",
    "Request",
    "Restored",
    "__version__",
    "convert",
    "inspect",
    "restore",
    "target",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load a name of the API."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fse_convert import api

    return getattr(api, name)


def __dir__() -> list[str]:
    """List the API."""
    return __all__
