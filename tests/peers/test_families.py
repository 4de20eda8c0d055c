"""The rows of families against the published code that they were read in: every key of a row stands in the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fse_convert.model.families.family import Family
from fse_convert.model.families.find import FAMILIES
from tests.peers.sglang_run import ENVIRONMENT

pytestmark = pytest.mark.peers
transformers = pytest.importorskip("transformers", minversion="5", reason="pip install 'fse-convert[dev]'")


@pytest.fixture(scope="module")
def published(python: Path) -> dict[str, Path]:
    """Every file that reads a model's config, in vLLM 0.33, SGLang 0.5.23 and transformers."""
    vllm, sglang = (next(root.glob("lib/python3*/site-packages")) for root in (python.parents[1], ENVIRONMENT))
    folders = (
        *(vllm / "vllm" / name for name in ("model_executor/models", "models", "transformers_utils", "config")),
        *(sglang / "sglang/srt" / name for name in ("models", "configs")),
        Path(transformers.__file__).parent / "models",
    )
    return {str(path): path for folder in folders for path in folder.rglob("*.py")}


def read(family: Family, published: dict[str, Path]) -> str:
    """The text of the files that a row names, and of those that are called like its model types."""
    named = tuple(f"/{name}" for name in re.findall(r"[\w/]+\.py", family.source))
    own = tuple(f"/models/{t.removesuffix('_text').replace('-', '_')}/" for t in family.model_types)
    chosen = (path for name, path in published.items() if name.endswith(named) or any(folder in name for folder in own))
    return "\n".join(path.read_text(encoding="utf-8") for path in chosen)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name} {f.model_types[0]}")
def test_every_key_of_a_row_is_one_that_published_code_reads(family: Family, published: dict[str, Path]) -> None:
    keys = {w.key for w in (*family.widths, *family.readings)} | {*family.n_routed_keys, *family.n_shared_keys}
    keys |= {family.hidden_key, *filter(None, [family.mtp_routed_key])}
    text = read(family, published)
    assert {key for key in keys if not re.search(rf"\b{key}\b", text)} == set()
