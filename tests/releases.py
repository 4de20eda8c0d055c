"""Names that move when a release is added to the tables, for tests that say nothing of one release; oldest first."""

from __future__ import annotations

from fse_convert.servers.aiter.question import AITER_TARGETS
from fse_convert.servers.slots import SLOT_TARGETS
from fse_convert.servers.targets import TARGETS

VLLM = [t.name for t in TARGETS if t.engine == "vLLM"]
SGLANG = [t.name for t in TARGETS if t.engine == "SGLang"]
AITER = [t.name for t in AITER_TARGETS if not (t.mega_moe or t.heterogeneous)]
MEGA = [t.name for t in AITER_TARGETS if t.mega_moe]
FHMOE = [t.name for t in AITER_TARGETS if t.heterogeneous]
SLOTS = [t.name for t in SLOT_TARGETS if t.engine == "SGLang"]
NEWEST = [t for t in TARGETS if t.engine == "vLLM"][-1]
"""The newest vLLM that is known."""
LAST = NEWEST.release.rpartition(".")[2]
"""Its last number, which ends a range in a report."""
FROM_031 = f"vllm-0.31..{LAST}"
"""How reports name those since 0.31 when they answer alike."""
