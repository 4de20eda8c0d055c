"""What is left out by its name."""

from __future__ import annotations

import pytest

from fse_convert.checkpoint.left_out import (
    ADAPTERS,
    BOOKKEEPING,
    CONSOLIDATED,
    COPIES,
    INDEXES,
    ORIGINALS,
    OTHER_FORMATS,
    RANKS,
    TRAINING,
    Kind,
    beside,
    find_clutter,
    notes,
)

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("._model.safetensors", "._model.safetensors"),
        ("inference/._config.json", "inference/._config.json"),
        (".DS_Store", ".DS_Store"),
        ("__MACOSX/x/y.json", "__MACOSX/"),
        ("Thumbs.db", "Thumbs.db"),
        ("figures/thumbs.db", "figures/thumbs.db"),
        ("Desktop.ini", "Desktop.ini"),
        ("config.json:Zone.Identifier", "config.json:Zone.Identifier"),
        ("model-00001-of-00002.safetensors.incomplete", "model-00001-of-00002.safetensors.incomplete"),
        ("model.safetensors.part", "model.safetensors.part"),
        (".model.safetensors.a8Xk2Q", ".model.safetensors.a8Xk2Q"),
        (".nfs000000000a3c0f5e00000001", ".nfs000000000a3c0f5e00000001"),
        (".fuse_hidden0000000a00000001", ".fuse_hidden0000000a00000001"),
        ("config.json~", "config.json~"),
        (".config.json.swp", ".config.json.swp"),
        ("#config.json#", "#config.json#"),
        (".#config.json", ".#config.json"),
        ("config.json.orig", "config.json.orig"),
        ("config.json.bak", "config.json.bak"),
        (".ipynb_checkpoints/config-checkpoint.json", ".ipynb_checkpoints/"),
        ("inference/__pycache__/model.pyc", "inference/__pycache__/"),
        (".git/HEAD", ".git/"),
        (".cache/huggingface/x", ".cache/"),
        ("._____temp/model-00001-of-00002.safetensors", "._____temp/"),
        (".mdl", ".mdl"),
        (".msc", ".msc"),
        (".mv", ".mv"),
    ],
)
def test_clutter(path: str, part: str) -> None:
    found = find_clutter(path)
    assert found is not None
    assert found[0] == part


def test_an_unfinished_download_of_modelscope_is_none_of_macos() -> None:
    found = find_clutter("._____temp/config.json")
    assert found is not None
    assert found[1].what == "an unfinished download of ModelScope"
    assert "finish the download" in found[1].hint
    assert "removed" not in found[1].hint


@pytest.mark.parametrize("name", [".mdl", ".msc", ".mv"])
def test_modelscopes_bookkeeping_is_never_mentioned(name: str) -> None:
    found = find_clutter(name)
    assert found is not None
    assert found[1] is BOOKKEEPING
    assert list(notes({name: found[1]}, "here")) == []


@pytest.mark.parametrize(
    "path",
    [
        ".gitattributes", ".gitignore", "README.md", "LICENSE", "config.json", "hf_quant_config.json", "tokenizer.json",
        "model-00001-of-00002.safetensors", INDEX, "chat_template.jinja", "modeling_x.py", "tokenizer.model",
        "inference/config.json", "merges.txt", "fse/manifest.json", "encoding/tests/test_input_1.json", "original.json",
        "thumbs.json", ".eval_results/x.yaml",
    ],
)  # fmt: skip
def test_a_checkpoints_own_files_are_neither_clutter_nor_beside_it(path: str) -> None:
    assert find_clutter(path) is None
    assert beside([*SHARDS, INDEX, path], SHARDS, whole=True) == {}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("adapter_model.safetensors", ADAPTERS),
        ("adapter_config.json", ADAPTERS),
        ("consolidated.safetensors", CONSOLIDATED),
        ("consolidated-00001-of-00002.safetensors", CONSOLIDATED),
        ("consolidated.safetensors.index.json", CONSOLIDATED),
        ("model.fp8.safetensors.index.json", INDEXES),
        ("pytorch_model.bin", OTHER_FORMATS),
        ("pytorch_model-00001-of-00002.bin", OTHER_FORMATS),
        ("pytorch_model.bin.index.json", OTHER_FORMATS),
        ("consolidated.00.pth", OTHER_FORMATS),
        ("original/consolidated.00.pth", OTHER_FORMATS),
        ("original/model.safetensors", ORIGINALS),
        ("model.pt", OTHER_FORMATS),
        ("model-Q4_K_M.gguf", OTHER_FORMATS),
        ("tf_model.h5", OTHER_FORMATS),
        ("flax_model.msgpack", OTHER_FORMATS),
        ("flax_model-00001-of-00002.msgpack", OTHER_FORMATS),
        ("tf_model.h5.index.json", OTHER_FORMATS),
        ("rust_model.ot", OTHER_FORMATS),
        ("Q4_K_M/x-00001-of-00002.gguf", OTHER_FORMATS),
        ("metal/model.bin", OTHER_FORMATS),
        ("openvino/openvino_model.xml", OTHER_FORMATS),
        ("onnx/model.onnx", OTHER_FORMATS),
        ("onnx/decoder_model_merged_q4.onnx", OTHER_FORMATS),
        ("model_fp16.onnx", OTHER_FORMATS),
        ("onnx/model.onnx_data", OTHER_FORMATS),
        ("model.onnx_data_1", OTHER_FORMATS),
        ("model.onnx.data", OTHER_FORMATS),
        ("training_args.bin", TRAINING),
        ("optimizer.pt", TRAINING),
        ("scheduler.pt", TRAINING),
        ("rng_state.pth", TRAINING),
        ("rng_state_7.pth", TRAINING),
        ("random_states_0.pkl", TRAINING),
        ("__0_0.distcp", TRAINING),
        ("pytorch_model_fsdp_0/__3_0.distcp", TRAINING),
        ("checkpoint-500/config.json", TRAINING),
        ("checkpoint-500/model.safetensors", TRAINING),
        ("model0-mp8.safetensors", RANKS),
        ("inference/model0-mp8.safetensors", RANKS),
    ],
)
def test_weights_beside_a_whole_checkpoint(path: str, kind: Kind) -> None:
    assert beside([*SHARDS, INDEX, path], SHARDS, whole=True) == {path: kind}
    assert beside([*SHARDS, INDEX, path], [*SHARDS, path], whole=True) == {}, "what the index lists is a shard"


@pytest.mark.parametrize(
    "path",
    [
        "tokenizer.bin", "vocab.bin", "speech-lora/adapter_model.safetensors", "vae/model.safetensors", "campplus.onnx",
        "audio_detokenizer/model.pt", "mm_projector.bin", "vocoder/pytorch_model.bin", "spk_dict.pt", "codec/x.onnx_data",
        "assets/prompt.npz", "token2wav/flow.pt", "speech-encoder.bin.index.json",
    ],
)  # fmt: skip
def test_what_a_server_may_need_is_carried(path: str) -> None:
    assert beside([*SHARDS, INDEX, path], SHARDS, whole=True) == {}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["consolidated.safetensors"], []),
        (["model.safetensors", "consolidated.safetensors"], ["consolidated.safetensors"]),
        (["model0-mp2.safetensors", "model1-mp2.safetensors"], []),
        (["model.safetensors", "model0-mp8.safetensors"], ["model0-mp8.safetensors"]),
        (["adapter_model.safetensors"], ["adapter_model.safetensors"]),
        (["model.safetensors", "model (1).safetensors"], ["model (1).safetensors"]),
    ],
)  # fmt: skip
def test_without_an_index_another_cut_of_the_weights_counts_where_there_is_no_other(names: list[str], left: list[str]) -> None:
    assert list(beside(names, None, whole=False)) == left


def test_where_listed_shards_are_absent_headers_must_tell() -> None:
    assert beside(["consolidated.safetensors", "pytorch_model.bin"], SHARDS, whole=False) == {"pytorch_model.bin": OTHER_FORMATS}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["model.safetensors.1", "config.json.1", "config.json"], {"config.json.1": COPIES}),
        ([SHARDS[0], f"{SHARDS[0]}.1", f"{SHARDS[0]}.2"], {f"{SHARDS[0]}.1": COPIES, f"{SHARDS[0]}.2": COPIES}),
        (["model.safetensors", "model (1).safetensors"], {"model (1).safetensors": COPIES}),
        ([SHARDS[0], SHARDS[0].replace(".", "(2)."), "config (1).json"], {SHARDS[0].replace(".", "(2)."): COPIES}),
        (
            ["config.json", "config - Copy.json", "config - Copy (2).json"],
            dict.fromkeys(["config - Copy.json", "config - Copy (2).json"], COPIES),
        ),
        (["model.safetensors", "model copy 3.safetensors", "copy.safetensors"], {"model copy 3.safetensors": COPIES}),
        ([".metadata", "x/.metadata", "x/__0_0.distcp"], {"x/.metadata": TRAINING, "x/__0_0.distcp": TRAINING}),
        ([".metadata", "__0_0.distcp"], {".metadata": TRAINING, "__0_0.distcp": TRAINING}),
    ],
    ids=[
        "pieces of one file are not copies of it",
        "wget's second downloads",
        "a browser's second download",
        "only beside what they are copies of",
        "copies of Windows",
        "copies of macOS",
        "sharded save in a folder",
        "sharded save at the root",
    ],
)
def test_what_is_left_out_only_for_a_file_beside_it(names: list[str], left: dict[str, Kind]) -> None:
    assert beside(names, SHARDS, whole=True) == left


def test_of_two_downloads_neither_is_said_to_be_removable() -> None:
    (note,) = notes({"model.safetensors.1": COPIES}, "here")
    assert note.hint == "a second download makes them; compare both before you remove either"


def test_one_note_a_kind() -> None:
    found = {"b.gguf": OTHER_FORMATS, "a.bin": OTHER_FORMATS, "adapter_config.json": ADAPTERS}
    first, second = notes(found, "here")
    assert (first.code, first.where) == ("left-out", "here")
    assert first.message == "weights in other formats than safetensors, left out: 2 (a.bin, b.gguf)"
    assert "keep the width of the source" in first.hint
    assert second.message == "an adapter beside its base, left out: 1 (adapter_config.json)"
