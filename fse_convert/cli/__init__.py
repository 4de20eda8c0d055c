"""The command line: parse, call, render, exit. No logic, and no torch until a command needs it."""

from fse_convert.cli import card, completion, convert, doctor, explain, inspect, restore, targets, verify
from fse_convert.cli.app import cli
from fse_convert.cli.process import main

__all__ = ["card", "cli", "completion", "convert", "doctor", "explain", "inspect", "main", "restore", "targets", "verify"]
