"""The manifest of an output against the source: what it says must follow from the source and its own arguments.

``verify`` plans again from the manifest's arguments, by the rules that a conversion uses: a manifest is not believed about its
own layers. Padding and config edits are those that `fse_convert.verification.expected` derives apart from the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

import fse_convert
from fse_convert.checkpoint.encoding import sha256
from fse_convert.checkpoint.folder import LocalFolder
from fse_convert.checkpoint.header import LENGTH_BYTES, TensorInfo
from fse_convert.checkpoint.names import MANIFEST
from fse_convert.errors import InvalidCheckpoint, NotConvertible
from fse_convert.plan.manifest import draft_manifest, shard_identities, small_digests
from fse_convert.plan.plan import Experts, Options, Plan
from fse_convert.plan.planner import make_plan
from fse_convert.plan.source import Source
from fse_convert.servers.judge import ALL_TARGETS
from fse_convert.sidecar.manifest import CHANGE_ARGUMENTS, DIGEST, NOT_ASKED, Manifest, checked, read_value
from fse_convert.verification.expected import ExpectedOutput, swiglu_limit
from fse_convert.verification.findings import (
    ABSENT,
    BOUND,
    KERNEL_REASONS,
    NO_LAYERS,
    SEED,
    TOKENS,
    Findings,
    Like,
    Mismatch,
    StorageResult,
    json_mismatches,
    short,
)
from fse_convert.verification.loss import DIGITS, ExpertLoss, MatrixLoss, rounded
from fse_convert.verification.padded import Padded

READ_BACK_KEYS = ("proof", "files", "tensors", DIGEST)
"""Keys that a conversion adds after it has read its output back, in their order."""
A_FIGURE = Like(f"a number of {DIGITS} digits", lambda x: isinstance(x, float) and isfinite(x) and x == rounded(x))
A_TEXT = Like("a text", lambda value: isinstance(value, str))
NOTHING_TO_RUN_ON = {"status": "not-run", "reason": NO_LAYERS}


@dataclass(frozen=True, slots=True)
class OutputManifest:
    """The manifest of an output. ``value``: the JSON as it was read, with whatever `Manifest` does not know.

    ``content``: the same, typed, but for ``server`` and ``proof``: these are only compared, whatever they hold.
    """

    content: Manifest
    value: Mapping[str, Any]

    @property
    def recoded(self) -> int:
        """How many experts were computed because their format changed, as far as it is recorded."""
        count = self.level("numerics").get("experts")
        return count if type(count) is int else 0

    def level(self, name: str) -> Mapping[str, Any]:
        """Return what it says of a level of the proof; empty where that is no object."""
        proof = self.value.get("proof")
        found = proof.get(name) if isinstance(proof, dict) else None
        return found if isinstance(found, dict) else {}

    @classmethod
    def read(cls, out: LocalFolder) -> OutputManifest:
        """Read it from an output; see `fse_convert.sidecar.manifest.read_value` for the errors."""
        return cls.of(read_value(out))

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> OutputManifest:
        """Type JSON values. Raises VerificationFailure, which names the JSON path."""
        proof = dict.fromkeys(("storage", "numerics", "kernel"), NOT_ASKED)
        return cls(checked({**value, "server": None, "proof": proof}), value)

    @property
    def kernel_note(self) -> str:
        """What it says of the kernel level if it says that it passed, for people; empty otherwise."""
        kernel = self.level("kernel")
        if kernel.get("status") != "passed":
            return ""
        layers, device, version = (short(kernel.get(key)).strip('"') for key in ("layers", "device", "deep_gemm"))
        return f"passed for {layers} layers on {device}, DeepGEMM {version}"

    @property
    def tool_note(self) -> str:
        """That another version wrote it; empty where this version did."""
        version = self.content.tool.version
        if version == fse_convert.__version__:
            return ""
        return f"written by fse-convert {short(version)}, compared with what {fse_convert.__version__} would write"


def expected_output(manifest: OutputManifest, source: Source, plan: Plan | None, findings: Findings) -> ExpectedOutput | None:
    """Return what the source asks for by a manifest, of which all but the proof is checked; None where that cannot be told.

    ``plan``: of the conversion that drafted the manifest; else it is planned again.
    """
    unlike = source_mismatches(manifest.content, source)
    planned = plan or (None if unlike else plan_again(manifest.content, source))
    if unlike or not isinstance(planned, Plan):
        findings.add(*unlike, *([planned] if isinstance(planned, Mismatch) else []))
        return None
    expected = ExpectedOutput.of(planned)
    if plan is not None:
        findings.add(*key_mismatches(derived_keys(expected), manifest))
        return expected
    keys = expected_manifest(expected, manifest.content)
    unlike = key_mismatches({"model": keys["model"]}, manifest)
    findings.add(*(unlike or manifest_mismatches(keys, manifest)))
    return None if unlike else expected  # with other widths there is no telling which bytes to expect


def source_mismatches(manifest: Manifest, source: Source) -> list[Mismatch]:
    """Tell whether this is the source that the output was made from, by the digests of its small files and headers, read again."""
    shards = {n: msgspec.to_builtins(s) for n, s in shard_identities(source.checkpoint).items()}
    files = small_digests(source.checkpoint)
    recorded = msgspec.to_builtins(manifest.source)
    mismatches = [
        *json_mismatches("source-differs", MANIFEST, recorded["files"], files, "source.files"),
        *json_mismatches("source-differs", MANIFEST, recorded["shards"], shards, "source.shards"),
    ]
    for name, text in manifest.source.originals.items():
        raw = text.encode("utf-8")
        header = shards.get(name, {}).get("header_sha256")
        if sha256(raw) != files.get(name) and sha256(len(raw).to_bytes(LENGTH_BYTES, "little") + raw) != header:
            where = f"source.originals: {name} as the source has it"
            mismatches.append(Mismatch("source-differs", MANIFEST, expected=where, found="another text"))
    return mismatches


def plan_again(manifest: Manifest, source: Source) -> Plan | Mismatch:
    """Plan the conversion that a manifest says was made; return a mismatch when there is none."""
    arguments = manifest.arguments
    why = f"no target {arguments.target!r}"
    target = next((t for t in ALL_TARGETS if t.name == arguments.target), None)
    if target or not arguments.target:
        try:
            formats = {name: getattr(arguments, name) is True for name in CHANGE_ARGUMENTS}
            options = Options(target, Experts(arguments.experts), arguments.tp, arguments.allow_unfused, **formats)
            return make_plan(source, options)
        except (InvalidCheckpoint, NotConvertible, ValueError) as e:
            why = str(e).partition("\n")[0]
    found = f"{short(msgspec.to_builtins(arguments))}: {why}"
    return Mismatch("manifest", MANIFEST, expected="arguments by which the source converts", found=found)


def derived_keys(expected: ExpectedOutput) -> dict[str, Any]:
    """Return the keys of the manifest that are derived apart from the planner: a conversion drafts all others from its plan."""
    padded = {t.name: list(t.holds.info.shape) for t in expected.tensors if isinstance(t.holds, Padded)}
    copied = ((t.name, t.holds.name) for t in expected.tensors if isinstance(t.holds, TensorInfo))
    renamed = {name: old for name, old in copied if name != old}
    stretches = {t.name: t.holds.stretches for t in expected.tensors if isinstance(t.holds, Padded) and t.holds.is_many}
    derived = {"config_edits": msgspec.to_builtins(expected.config_edits), "padded": padded}
    return derived | ({"renamed": renamed} if renamed else {}) | ({"stretches": stretches} if stretches else {})


def expected_manifest(expected: ExpectedOutput, manifest: Manifest) -> dict[str, Any]:
    """Return what a manifest must say, but for `READ_BACK_KEYS`; the tool that wrote ``manifest`` may be of another version."""
    value = draft_manifest(expected.plan, expected.texts).value() | derived_keys(expected)
    value["tool"]["version"] = manifest.tool.version
    other = manifest.tool.version != fse_convert.__version__
    return {key: _in_any_words(value[key]) if other else value[key] for key in value if key not in READ_BACK_KEYS}


def _in_any_words(value: Any) -> Any:
    """Accept every text as the message of a reason: another version may word it otherwise, and its code says the same."""
    if isinstance(value, dict):
        return {key: A_TEXT if key == "message" else _in_any_words(held) for key, held in value.items()}
    return [_in_any_words(v) for v in value] if isinstance(value, list) else value


def key_mismatches(expected: Mapping[str, Any], manifest: OutputManifest) -> list[Mismatch]:
    """Compare keys of a manifest with what they must hold: the first difference in each, and in each layer."""
    mismatches: list[Mismatch] = []
    for key, want in expected.items():
        got = manifest.value.get(key, ABSENT)
        if key == "layers" and isinstance(got, list) and len(got) == len(want):
            for i, layer in enumerate(want):
                mismatches += _compare(f"layers[{i}]", layer, got[i])
        else:
            mismatches += _compare(key, want, got)
    return mismatches


def manifest_mismatches(expected: Mapping[str, Any], manifest: OutputManifest) -> list[Mismatch]:
    """Compare a manifest with all that it must say before anything is read back; keys that are unknown here are mismatches."""
    value, keys = manifest.value, [*expected, *READ_BACK_KEYS]
    mismatches = key_mismatches(expected, manifest)
    extra, missing = [k for k in value if k not in keys], [k for k in READ_BACK_KEYS if k not in value]
    mismatches += [Mismatch("manifest", MANIFEST, expected=f"no key {key}", found=short(value[key])) for key in extra]
    mismatches += [Mismatch("manifest", MANIFEST, expected=f"a key {key}", found=ABSENT) for key in missing]
    if not mismatches and list(value) != keys:
        return _compare("", dict.fromkeys(keys), dict.fromkeys(value))
    return mismatches


def _compare(path: str, expected: Any, actual: Any) -> list[Mismatch]:
    return json_mismatches("manifest", MANIFEST, expected, actual, path)


def digest_mismatches(manifest: Manifest, result: StorageResult) -> list[Mismatch]:
    """Compare the digests of what was read with those that the manifest keeps, if it does, and the names in both directions."""
    whole = result.sample is None
    mismatches: list[Mismatch] = []
    if manifest.tensors is not None:
        unlike = _unlike(manifest.tensors, result.tensors, whole=whole)
        mismatches += [Mismatch("tensor-digest", MANIFEST, name, None, want, got) for name, want, got in unlike]
    if manifest.files is not None:
        kept, read = ({n: f"{f.size} bytes, SHA-256 {f.sha256}" for n, f in d.items()} for d in (manifest.files, result.files))
        unlike = _unlike(kept, read, whole=whole)
        mismatches += [Mismatch("file-digest", name, "", None, want, got) for name, want, got in unlike]
    return mismatches


def _unlike(kept: Mapping[str, str], read: Mapping[str, str], *, whole: bool) -> list[tuple[str, str, str]]:
    names = sorted(kept.keys() | read.keys() if whole else read.keys())
    pairs = ((n, kept.get(n, "no digest stated"), read.get(n, "nothing to read")) for n in names)
    return [(name, a, b) for name, a, b in pairs if a != b]


def proof_mismatches(
    manifest: OutputManifest, expected: ExpectedOutput, result: StorageResult, tensors: Mapping[str, int]
) -> list[Mismatch]:
    """Compare ``proof`` with what a conversion can have found: the counts of this source, and only what was asked for.

    It is never this run's own result. ``tensors``: how many are comparable, by kind. Bytes and files are compared exactly
    where this run read everything back.
    """
    proof = manifest.value.get("proof")
    if not isinstance(proof, dict):
        return [Mismatch("manifest", MANIFEST, expected="proof an object", found=short(proof))]
    proved = manifest.value.get("files") is not None
    numerics = proof.get("numerics") != NOT_ASKED
    return _compare(
        "proof",
        {
            "storage": _expected_storage(result, tensors) if proved else NOT_ASKED,
            "numerics": _expected_numerics(expected) if proved and numerics else NOT_ASKED,
            "kernel": _expected_kernel(proof.get("kernel"), len(expected.experts)) if numerics else NOT_ASKED,
        },
        proof,
    )


def _expected_storage(result: StorageResult, tensors: Mapping[str, int]) -> dict[str, Any]:
    """After a sample, accept counts that are no smaller than what was seen."""
    record = storage_record(tensors, result.coverage.bytes, result.coverage.files)
    edited = result.findings.edited
    if result.sample is None and result.passed and not edited:
        return record
    size = result.coverage.bytes - sum(result.files[n].size for n in edited & result.files.keys())
    return record | {"bytes": _at_least(size, record["bytes"]), "files": _at_least(record["files"], record["files"])}


def _at_least(least: int, shown: int) -> Like:
    return Like(shown, lambda count: type(count) is int and count >= least)


def _expected_numerics(expected: ExpectedOutput) -> dict[str, Any]:
    """Accept figures of what was rounded that could be such; whether they are right, `figure_mismatches` tells."""
    recoded = tuple(expected.recoded)
    lossy = [e for e in recoded if not e.lossless]
    matrices = {name: dict.fromkeys(MatrixLoss._fields, A_FIGURE) for e in lossy for name in e.modules}
    losses = {"matrices": matrices, "outputs": dict.fromkeys((e.prefix for e in lossy), A_FIGURE)} if lossy else {}
    return numerics_record(expected.computed_layers, swiglu_limit(expected.source), len(recoded), losses)


def figure_mismatches(manifest: OutputManifest, losses: Iterable[ExpertLoss]) -> list[Mismatch]:
    """Compare the recorded figures of what was rounded with those that were measured again; where none are recorded, nothing."""
    recorded = manifest.level("numerics")
    if not recorded or recorded == NOT_ASKED:
        return []
    want = loss_record(losses)
    held = {key: value if isinstance(value := recorded.get(key), dict) else {} for key in want}
    got = {key: {name: held[key].get(name, ABSENT) for name in names} for key, names in want.items()}
    return [m for key in want for m in _compare(f"proof.numerics.{key}", want[key], got[key])]


def _expected_kernel(recorded: Any, layers: int) -> dict[str, Any]:
    if recorded == NOT_ASKED:
        return NOT_ASKED
    if not layers:
        return NOTHING_TO_RUN_ON
    if not isinstance(recorded, dict) or recorded.get("status") != "passed":
        return {"status": "not-run", "reason": Like(" or ".join(KERNEL_REASONS), lambda reason: reason in KERNEL_REASONS)}
    text = Like("a text", lambda value: value is None or isinstance(value, str))
    error = Like("a number from 0 to 1", lambda value: isinstance(value, float) and 0 <= value < 1)
    return {"status": "passed", "layers": layers, "relative_l2": error, "device": text, "deep_gemm": text}


def storage_record(tensors: Mapping[str, int], size: int, files: int) -> dict[str, Any]:
    """Return the record of a storage level that passed. ``tensors``: how many were compared, by kind; ``size``: their bytes."""
    return {"status": "passed", "tensors": dict(tensors), "bytes": size, "files": files}


def numerics_record(layers: int, limit: float | None, recoded: int, losses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a numerics level that passed, measured, or had nothing to run on.

    ``limit``: the model's swiglu limit. ``recoded``: how many experts were computed because their format changed. ``losses``: the
    figures of what was rounded, as `loss_record` has them.
    """
    if not layers:
        return NOTHING_TO_RUN_ON
    return {
        "status": "measured" if losses else "passed",
        "layers": layers,
        **({"experts": recoded} if recoded else {}),
        "tokens": TOKENS,
        "seed": SEED,
        "swiglu_limit": limit,
        **(losses or {"criterion": BOUND}),
    }


def loss_record(losses: Iterable[ExpertLoss]) -> dict[str, dict[str, Any]]:
    """Return the figures of what was rounded: of matrices by name, and the relative L2 of what their experts compute."""
    held = tuple(losses)
    if not held:
        return {}
    matrices = {name: m._asdict() for loss in held for name, m in loss.matrices.items()}
    return {"matrices": matrices, "outputs": {loss.name: loss.output for loss in held}}
