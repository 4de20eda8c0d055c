"""What may be edited in an output."""

from __future__ import annotations

import pytest

from fse_convert.checkpoint.editable_files import is_editable


@pytest.mark.parametrize(
    ("name", "editable"),
    [
        (".gitattributes", True),
        ("README.md", True),
        ("README", True),
        ("LICENSE", True),
        ("LICENSE-CODE", True),
        ("LICENSE.txt", True),
        ("NOTICE", True),
        ("docs/deploy.md", True),
        ("figures/benchmark.png", True),
        ("figures/loss.PDF", True),
        ("config.json", False),
        ("model.safetensors.index.json", False),
        ("model.safetensors", False),
        ("fse/manifest.json", False),
        ("fse/README.md", False),
        ("tokenizer.json", False),
        ("merges.txt", False),
        ("chat_template.jinja", False),
        ("generation_config.json", False),
        ("license_head.safetensors", False),
        ("readme.py", False),
        ("modeling_x.py", False),
        ("notes.txt", False),
    ],
)
def test_what_may_be_edited_once_an_output_is_published(name: str, editable: bool) -> None:
    assert is_editable(name) is editable
