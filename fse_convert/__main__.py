"""``python -m fse_convert``."""

from fse_convert.cli import main

main()
