"""Exit codes of errors; those of answers and signals are tried by the commands' tests."""

from __future__ import annotations

from fse_convert import errors
from fse_convert.exit_codes import ERRORS, ExitCode


def test_every_class_of_errors_has_its_exit_code() -> None:
    classes = {c.__name__: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.FseConvertError)}
    assert ERRORS.keys() < classes.keys()
    assert {name: c(errors.Problem("a", "b")).exit_code for name, c in classes.items()} == {
        name: ERRORS.get(name, ExitCode.INVALID) for name in classes
    }
