"""Which files are a checkpoint's: the tables of what is left out.

A file is a shard, carried over, or left out. `find_clutter` and `beside` decide by name, for every command alike; which shards
stay out though their names do not tell, `fse_convert.checkpoint.unlisted` decides by headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fse_convert.checkpoint.names import CONFIG, INDEX, SUFFIX
from fse_convert.errors import Problem, some


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file that is left out: what to call several of them, and what to do about them, if anything."""

    what: str
    hint: str = ""


BOOKKEEPING = Kind("bookkeeping of version control and of the clients of hubs")
"""It comes with every download and is never mentioned."""
CLUTTER: tuple[tuple[Kind, str], ...] = (
    (BOOKKEEPING, r"\.git|\.hg|\.svn|\.cache|\.huggingface|\.mdl|\.msc|\.mv|__pycache__"),
    (
        Kind("an unfinished download of ModelScope", "finish the download if files are missing; leaving this out loses nothing"),
        r"\._____temp",
    ),
    (
        Kind("files that macOS makes beside others", "nothing reads them: they can be removed"),
        r"\._.*|\.DS_Store|\.AppleDouble|__MACOSX|\.Spotlight-V100|\.Trashes|\.fseventsd|\.TemporaryItems|\.apdisk",
    ),
    (
        Kind("files that Windows makes beside others", "nothing reads them: they can be removed"),
        r"(?i:e?h?thumbs\.db|desktop\.ini|.*:Zone\.Identifier|\$RECYCLE\.BIN|System Volume Information)",
    ),
    (
        Kind("placeholders of the file system", "the file system removes them itself"),
        r"\.nfs.*|\.fuse_hidden.*|\.smbdelete.*|\.__afs.*|lost\+found",
    ),
    (
        Kind("unfinished downloads or copies", "let what writes them finish, if the checkpoint lacks them"),
        r".*\.(incomplete|part|partial|crdownload|download|filepart|aria2|tmp|temp)|\..+\.(safetensors|json|bin)\.\w{6}",
    ),
    (
        Kind("backups and locks of editors", "move them elsewhere if you need them"),
        r".*~|.*\.sw[a-p]|#.*#|\.#.*|~\$.*|\.~lock\..*#|\.goutputstream-.*|.*\.(orig|bak|rej)",
    ),
    (Kind("checkpoints of notebooks"), r"\.ipynb_checkpoints"),
)
"""Never part of a checkpoint, by the name of the file or of a folder that it lies in."""
_CLUTTER = tuple((kind, re.compile(pattern)) for kind, pattern in CLUTTER)

OLD_WIDTH = "they keep the width of the source; serve them from the source, or copy them yourself if something needs them"
ADAPTERS = Kind("an adapter beside its base", "servers take an adapter from a folder of its own")
OTHER_FORMATS = Kind("weights in other formats than safetensors", OLD_WIDTH)
TRAINING = Kind(
    "checkpoints and states of a training", "servers do not read them beside a model; resume the training from the source"
)
ORIGINALS = Kind("copies of the model in its maker's own form", OLD_WIDTH)
RANKS = Kind("slices for the ranks of one server", "servers that read the index ignore them")
CONSOLIDATED = Kind("copies of the weights in Mistral's own form", "servers that read the index ignore them")
INDEXES = Kind("indexes under other names", f"servers read {INDEX}")
COPIES = Kind("copies of files beside them", "a second download makes them; compare both before you remove either")

WHOLE = "|".join(
    (
        r"(pytorch_model|tf_model|flax_model)[^/]*\.(bin|pt|pth|h5|msgpack)(\.index\.json)?",  # transformers
        r"rust_model\.ot|model_state[^/]*\.pdparams|(weights|model)\.npz|rank\d+\.engine|ggml-[^/]*\.bin",
        r"(original/)?consolidated[^/]*\.pth",  # Meta, Mistral
        r"(metal/)?model(-\d+-of-\d+)?\.(bin|pt|pth|ckpt)",  # gpt-oss has metal/
        r"(onnx/)?(decoder_)?model[^/]*\.onnx([._]data(_\d+)?)?",  # optimum, transformers.js
        r"(openvino/)?openvino_model[^/]*\.(bin|xml)",
        r"(.*/)?[^/]*\.gguf",
    )
)
"""Names of whole models. Other names in these formats are parts that a model needs: a projector, a vocoder, a speaker's encoder."""
BESIDE: tuple[tuple[Kind, str], ...] = (
    (ADAPTERS, r"adapter_(config\.json|model.*\.(safetensors|bin|pt)(\.index\.json)?)"),
    (TRAINING, r"(.*/)?((checkpoint-\d+|global_step_?\d+)/.*|[^/]*\.distcp)"),
    (TRAINING, r"training_args\.bin|(optimizer|scheduler)(_\d+)?\.(pt|pth|bin)|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"),
    (ORIGINALS, r"original/.*\.(safetensors|index\.json)"),
    (OTHER_FORMATS, WHOLE),
    (RANKS, r"(.*/)?(model\d+-mp\d+|model-rank-\d+-part-\d+|rank\d+)\.safetensors"),
    (CONSOLIDATED, r"consolidated[^/]*\.safetensors(\.index\.json)?"),
    (INDEXES, r"[^/]*safetensors[^/]*\.index[^/]*\.json"),
)
"""Not part of a checkpoint whose index does not list them, by their path in it."""
_BESIDE = tuple((kind, re.compile(pattern)) for kind, pattern in BESIDE)
SLICE = re.compile(r"model\d+-mp(?!1\.)\d+\.safetensors|model-rank-\d+-part-\d+\.safetensors|rank\d+\.safetensors")
"""Names of rank slices that are no whole model."""
COPY = re.compile(
    r"(?P<whole>.*\.(?:safetensors|json|jinja|model|txt|py|bin))\.\d+"
    r"|(?P<stem>.+?)(?: ?\(\d+\)| - Copy(?: \(\d+\))?| copy(?: \d+)?)(?P<suffix>\.\w+)"
)
"""What wget, browsers, Windows and macOS call a download or copy of a file that is there already."""


def find_clutter(path: str) -> tuple[str, Kind] | None:
    """Return the part of a path that is never part of a checkpoint (a folder with a slash at its end), and its kind, or None."""
    at = ""
    for part in path.split("/"):
        at += part
        for kind, pattern in _CLUTTER:
            if pattern.fullmatch(part):
                return at + "/" * (at != path), kind
        at += "/"
    return None


def beside(names: Collection[str], listed: Collection[str] | None, *, whole: bool) -> dict[str, Kind]:
    """Return what of a folder without clutter is left out by its name, with its kind.

    ``listed``: the shards that the index lists, None without one. ``whole``: whether all of them are there; then, or with another
    single file beside them, other cuts of the same weights are left out too.
    """
    known = {CONFIG, INDEX, *(listed or ())}
    found = {n: kind for n in names if n not in known and (kind := _kind(n, names))}
    shards = [n for n in names if n.endswith(SUFFIX) and "/" not in n]
    weights_complete = whole if listed is not None else any(n not in found for n in shards)
    if not weights_complete:
        found = {n: kind for n, kind in found.items() if n not in shards or kind is ADAPTERS}
    return found


def _kind(name: str, names: Collection[str]) -> Kind | None:
    """Return the kind of what is left out by its own path, or only because of a file beside it."""
    for kind, pattern in _BESIDE:
        if pattern.fullmatch(name):
            return kind
    if (copy := COPY.fullmatch(name)) and (copy["whole"] or copy["stem"] + copy["suffix"]) in names:
        return COPIES
    folder, _, leaf = name.rpartition("/")
    if leaf == ".metadata" and any(n.endswith(".distcp") and n.rpartition("/")[0] == folder for n in names):
        return TRAINING
    return None


def notes(left: Mapping[str, Kind], where: str) -> Iterator[Problem]:
    """Say what is left out: one note a kind, with the count and the first names."""
    by_kind: dict[Kind, list[str]] = {}
    for name, kind in left.items():
        by_kind.setdefault(kind, []).append(name)
    for kind, names in by_kind.items():
        if kind is not BOOKKEEPING:
            yield Problem("left-out", f"{kind.what}, left out: {len(names)} ({some(sorted(names))})", where, kind.hint)
