"""Names that move when a release is added to the tables, for tests that say nothing of one release."""

from __future__ import annotations

from fse_convert.servers.targets import TARGETS

NEWEST = [t for t in TARGETS if t.engine == "vLLM"][-1]
"""The newest vLLM that is known."""
FROM_031 = f"vllm-0.31..{NEWEST.release.rpartition('.')[2]}"
"""How reports name those since 0.31 when they answer alike."""
