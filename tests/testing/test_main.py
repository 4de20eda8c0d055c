"""``python -m fse_convert.testing``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fse_convert.testing.__main__ import main


def test_writes_a_checkpoint_and_says_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    knobs = "--kind v4.1-flash --layers 2 --experts 3 --hidden 128 --width 96 --vocab 8 --engram-rows 5 --mtp-experts 2"
    main([str(tmp_path / "out"), *knobs.split(), "--shard-size", "1MiB"])
    (line,) = capsys.readouterr().out.splitlines()
    assert "2 layers with 3 routed and 1 shared experts of width 96 (hidden 128), 1 MTP layers with 2:" in line


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(SystemExit, match="is not empty"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        pytest.param("--engram-rows", "3", id="no such knob of the kind"),
        pytest.param("--shard-size", "3 parsecs", id="no size"),
    ],
)
def test_a_knob_that_does_not_fit_writes_nothing(knob: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: "):
        main([str(tmp_path / "new"), "--kind", "v4-flash", knob, value])
    assert not (tmp_path / "new").exists()
