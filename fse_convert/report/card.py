"""The section of a model card that tells what a published output is: base model, changes, proof, and how to serve it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fse_convert.errors import counted
from fse_convert.plan.plan import Experts
from fse_convert.report.templates import template
from fse_convert.servers.aiter.families import find_aiter_family
from fse_convert.servers.aiter.question import AiterTarget
from fse_convert.servers.commands import serve_command
from fse_convert.servers.judge import ALL_TARGETS, AnyTarget
from fse_convert.servers.slots import SlotTarget, slot_needs
from fse_convert.sidecar.manifest import FUSED, Manifest

FORMAT_CHANGES: Mapping[str, str] = {
    "routed-fp8": "Routed experts are stored as FP8 blocks with F32 scales instead of MXFP4, every value exact",
    "shared-mxfp4": "Shared experts are stored as MXFP4, which rounds their values",
}
"""What a change of format did, by its name in the manifest."""
MEND = "A defect of `config.json` or of labels was mended, no value of the model changed"
"""What all other changes did."""


def card(manifest: Manifest, folder: Path, repo: str = "", base: str = "") -> str:
    """Return the section of an output in ``folder`` as Markdown.

    ``repo``: its own repository on the Hub; ``base``: its base model. Both are ``org/name[@revision]``, empty if not known.
    """
    name, _, own_revision = repo.partition("@")
    target, place = _target(manifest), shlex.quote(name.rpartition("/")[2] or folder.resolve().name)
    (model, _, revision), fse = base.partition("@"), manifest.contract is not None
    return template("card.md.j2").render(
        manifest=manifest,
        base=base,
        base_url=f"https://huggingface.co/{model}{f'/tree/{revision}' if revision else ''}",
        source=f"hf://{base}" if base else "CHECKPOINT",
        repo=name,
        revision=own_revision,
        place=place,
        changes=list(_changes(manifest)),
        proof={level: _level(getattr(manifest.proof, level)) for level in ("storage", "numerics", "kernel")},
        target=target,
        title=f"{target.engine} {target.release}" if target else "",
        command=serve_command(target, place, manifest.model.model_type, fse=fse, tp=manifest.arguments.tp) if target else "",
        alone=_alone(manifest),
        restorable=manifest.arguments.drop_originals is not True,
    )


def _target(manifest: Manifest) -> AnyTarget | None:
    """Return the server that was converted for, or the contract, with the flags and conditions that it has for this output."""
    target = next((t for t in ALL_TARGETS if t.name == manifest.arguments.target), None)
    if isinstance(target, AiterTarget) and not (target.mega_moe or target.heterogeneous):
        family = find_aiter_family({"model_type": manifest.model.model_type})
        return replace(target, conditions=family.needs if family else ())
    if not isinstance(target, SlotTarget):
        return target
    return replace(target, started_with=slot_needs(target, [layer.routed.format for layer in manifest.layers if layer.routed]))


def _changes(manifest: Manifest) -> Iterator[str]:
    width = manifest.model.width
    for change in manifest.changes or ():
        yield f"{FORMAT_CHANGES.get(change.name, MEND)} (`{change.name}`, {'lossless' if change.lossless else _loss(manifest)})."
    if width.main != width.source:
        padded = counted(len(manifest.padded), "tensor")
        yield f"Experts are {width.main} wide instead of {width.source}: {padded} padded, by channels that compute 0."
    for edit in manifest.config_edits:
        yield f"`config.json`: `{edit.section + '.' if edit.section else ''}{edit.key}` {edit.old} -> {edit.new}."
    if manifest.contract:
        layers = f"{len(manifest.kernel_prefixes)} of {counted(len(manifest.layers), 'MoE layer')}"
        wider = f", {width.kernel} wide" if manifest.arguments.experts == Experts.SHARED.value else ""
        yield f"`fse/` is new: the shared experts of {layers} in the kernel's layout{wider}."
    yield "All other tensors are those of the base model, byte for byte."


def _loss(manifest: Manifest) -> str:
    """Say what rounding cost, as it was measured."""
    matrices = manifest.proof.numerics.get("matrices", {})
    worst = max((figures["relative_l2"] for figures in matrices.values()), default=None)
    return f"lossy: relative L2 of a matrix at most {worst}" if worst is not None else "lossy: the error was not measured"


def _level(record: Mapping[str, Any]) -> str:
    """Say what a level of the proof found, as the manifest has it."""
    status = str(record["status"]).replace("-", " ")
    if status == "measured":
        worst = max(figures["relative_l2"] for figures in record["matrices"].values())
        return f"measured, not bit-equal: {len(record['matrices'])} matrices rounded, relative L2 at most {worst}"
    if status != "passed":
        return f"{status}: {record['reason']}"
    if "tensors" in record:
        sorts = ", ".join(f"{n:,} {'in kernel layout' if sort == 'kernel' else sort}" for sort, n in record["tensors"].items() if n)
        return f"passed: every tensor against the base model, byte for byte ({sorts})"
    on = f" on {record['device']}" if "device" in record else ", computed from both sides, bit-equal"
    return f"passed: {counted(record['layers'], 'layer')}{on}"


def _alone(manifest: Manifest) -> str:
    """Say what the server that was converted for makes of the standard layout, without the plugin."""
    server = manifest.server
    if server is None:
        return ""
    fused = sum(verdict == FUSED for verdict in server.layers.values())
    return f"{server.engine} {server.release} fuses {fused} of {counted(len(server.layers), 'MoE layer')} of it."
