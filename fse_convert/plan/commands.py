"""The program's own commands as people paste them: with every option that what is said of them rests on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fse_convert.model.families.find import find_family
from fse_convert.plan.plan import Experts, Options
from fse_convert.servers.subject import Subject


def conversion_command(checkpoint: Subject, address: str, options: Options) -> str:
    """Return the command that converts a checkpoint so, into a new folder of the working directory, named like it and the options.

    ``address``: its path, or that on the Hub.
    """
    arguments = list(_arguments(options))
    out = _folder(address, arguments)
    family = _family(checkpoint.config, checkpoint.description.family_name)
    return shlex.join(["fse-convert", address, out, *arguments, *family])


def inspection_command(address: str, config: Mapping[str, Any], family: str) -> str:
    """Return the command that inspects a checkpoint of a family, or an output of it. ``config``: its config.json."""
    return shlex.join(["fse-convert", "inspect", address, *_family(config, family)])


def _folder(address: str, arguments: Sequence[str]) -> str:
    """Return a name of its own for what each list of arguments makes; ``--target`` is left out of it."""
    name = address.rstrip("/").rpartition("/")[2].strip(".")
    name = name.partition("@")[0] if address.startswith("hf://") else name
    words = [word.removeprefix("--") for word in arguments if word != "--target"] or ["converted"]
    return "-".join(filter(None, (name, *words)))


def _arguments(options: Options) -> Iterator[str]:
    if options.target:
        yield from ("--target", options.target.name)
    if options.tp > 1:
        yield from ("--tp", str(options.tp))
    if options.routed_fp8:
        yield from ("--routed", "fp8")
    if options.shared_mxfp4:
        yield from ("--shared", "mxfp4")
    if options.experts is not Experts.ALL:
        yield from ("--experts", options.experts.value)
    for flag in ("heal", "lossy", "drop_originals", "allow_unfused"):
        if getattr(options, flag):
            yield f"--{flag.replace('_', '-')}"


def _family(config: Mapping[str, Any], family: str) -> tuple[str, ...]:
    """Return the option that names the family, where config.json does not."""
    return ("--family", family) if find_family(config) is None else ()
