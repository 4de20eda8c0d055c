"""Commands and the serving loaders on a checkpoint or an output whose small files and headers a fuzzer wrote."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fse_convert.checkpoint.encoding import encode_json
from fse_convert.checkpoint.names import CONFIG, INDEX, MANIFEST, SIDECAR
from fse_convert.cli import main
from fse_convert.errors import NotServable
from fse_convert.exit_codes import ExitCode
from fse_convert.serving.sidecar import open_sidecar
from fse_convert.sidecar.manifest import DIGEST, own_digest
from fse_convert.testing.checkpoints import make_checkpoint
from fse_convert.testing.patch import read_header
from tests.verification.editing import seal
from tests.verification.recipes import KNOBS

BETWEEN = b"\xff\xff"
DOCUMENTED = {code.value for code in ExitCode} - {ExitCode.BUG.value}
QUIET = ("--verify", "storage", "--workers", "1", "-q")
WAYS = (
    ("--target", "megamoe-128"),
    ("--routed", "fp8"),
    ("--shared", "mxfp4", "--lossy"),
    ("--heal",),
    ("--target", "vllm-0.33-aiter"),
)


def exit_code(*args: object) -> int:
    """Run the command line; AssertionError for a traceback or a code that is not documented."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            main([str(a) for a in args])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    text = printed.getvalue()
    if code not in DOCUMENTED or "Traceback" in text:
        raise AssertionError(f"exit code {code} of {args}: {text}")
    return code


class Ground:
    """A checkpoint, an output of it, and a copy of each in which a fuzzer's bytes stand for small files and headers.

    An input is a byte of options and then, joined by `BETWEEN`, what each file is to hold; nothing stands for what it holds.
    Of a shard it is the header: the payload stays. A manifest that is JSON gets its own digest again, so that what it says is
    read; if the highest option bit is set, the digests of files and tensors are made again too.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        made, converted = home / "made", home / "converted"
        make_checkpoint(made, "v4-flash", **KNOBS)
        exit_code(made, converted, *QUIET, *WAYS[0])
        exit_code(made, home / "recoded", *QUIET, *WAYS[1])
        self.pristine = {name: self._contents(home / name) for name in ("made", "converted", "recoded")}

    @staticmethod
    def _contents(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def parts(self, which: str) -> list[str]:
        """The files that a fuzzer writes: JSON, and the headers of a rewritten shard and of that in ``fse/``."""
        files = self.pristine[which]
        shards = sorted((n for n in files if n.endswith(".safetensors")), key=lambda n: (n.startswith(SIDECAR), len(files[n])))
        texts = [n for n in (CONFIG, INDEX, MANIFEST, f"{SIDECAR}/{INDEX}") if n in files]
        return [*texts, *shards[-2:]]

    def lay(self, which: str, data: bytes) -> Path:
        """Write a folder as an input has it."""
        root = self.home / "laid"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.home / which, root)
        for name, raw in zip(self.parts(which), data[1:].split(BETWEEN), strict=False):
            if raw and name.endswith(".safetensors"):
                _, start = read_header(root / name)
                (root / name).write_bytes(len(raw).to_bytes(8, "little") + raw + self.pristine[which][name][start:])
            elif raw:
                (root / name).write_bytes(raw)
        with contextlib.suppress(Exception):  # what is no JSON, or no shard, has no digests to make again
            value = json.loads((root / MANIFEST).read_bytes())
            if data[:1] >= b"\x80":
                seal(root, value)
            else:
                (root / MANIFEST).write_bytes(encode_json({**value, DIGEST: own_digest(value)}))
        return root

    def seeds(self, which: str) -> Iterator[bytes]:
        """Every file in turn as it is, and nothing; with and without digests made again."""
        names = self.parts(which)
        for at, name in enumerate(names):
            raw = self.pristine[which][name]
            if name.endswith(".safetensors"):
                raw = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
            for options in (0, 0x80):
                yield bytes([options | (which == "recoded")]) + BETWEEN * at + raw

    def inspect(self, data: bytes) -> str:
        """``inspect`` of a checkpoint."""
        return str(exit_code("inspect", self.lay("made", data), *(("--json",) if data[:1] >= b"\x80" else ())))

    def convert(self, data: bytes) -> str:
        """``convert`` of a checkpoint in one of the ways; there is an output afterwards, or there is none."""
        out = self.home / "out"
        shutil.rmtree(out, ignore_errors=True)
        code = exit_code(self.lay("made", data), out, *QUIET, *WAYS[(data or b"\0")[0] % len(WAYS)])
        if out.exists() != (code == 0) or (self.home / ".out.fse-partial").exists():
            raise AssertionError(f"exit code {code}, and {sorted(p.name for p in self.home.iterdir())}")
        return str(code)

    def verify(self, data: bytes) -> str:
        """``verify`` of an output with its source, and alone."""
        which = self._output(data)
        out = self.lay(which, data)
        return f"{exit_code('verify', out, '--source', self.home / 'made', '-q')}, alone {exit_code('verify', out, '-q')}"

    def restore(self, data: bytes) -> str:
        """``restore`` of an output; there is an original afterwards, or there is none."""
        original = self.home / "original"
        shutil.rmtree(original, ignore_errors=True)
        code = exit_code("restore", self.lay(self._output(data), data), original, "-q")
        if original.exists() != (code == 0) or (self.home / ".original.fse-partial").exists():
            raise AssertionError(f"exit code {code}, and {sorted(p.name for p in self.home.iterdir())}")
        return str(code)

    def serve(self, data: bytes) -> str:
        """What the loaders inside vLLM and SGLang read: everything that is served is checked, or the loader refuses."""
        try:
            sidecar = open_sidecar(self.lay("converted", data))
            for layer in sidecar.layers:
                sidecar.check_original(layer)
                sidecar.tensors(layer)
        except NotServable:
            return "refused"
        return "served"

    @staticmethod
    def _output(data: bytes) -> str:
        """Which output an input is about, by its lowest option bit."""
        return "recoded" if (data or b"\0")[0] & 1 else "converted"


def targets(home: Path) -> dict[str, tuple[Callable[[bytes], str], list[bytes]]]:
    """What can be fuzzed, by name: the function, and its seeds."""
    ground = Ground(home)
    return {
        "inspect": (ground.inspect, list(ground.seeds("made"))),
        "convert": (ground.convert, list(ground.seeds("made"))),
        "verify": (ground.verify, [s for which in ("converted", "recoded") for s in ground.seeds(which)]),
        "restore": (ground.restore, [s for which in ("converted", "recoded") for s in ground.seeds(which)]),
        "serve": (ground.serve, list(ground.seeds("converted"))),
    }
