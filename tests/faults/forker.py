"""Forks a conversion, kills it after a while, and says how it ended: a real process without the start-up of one."""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.faults.server import preload


def main() -> None:
    """Read source, output and seconds, tab-separated, a line each."""
    from fse_convert.cli import main as run

    preload()
    for line in sys.stdin:
        source, out, seconds = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                run([source, out, "--verify", "storage"])
            except SystemExit as e:
                os._exit(int(e.code or 0))
        time.sleep(float(seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
