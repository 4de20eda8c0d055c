"""The SGLang plugin with stand-ins for SGLang; weights and sidecar are real. With SGLang: tests/peers/test_sglang_plugin.py."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fse_convert.errors import NotServable
from fse_convert.layout import ue8m0
from fse_convert.serving.sglang import hooks, modules
from fse_convert.serving.sidecar import KernelShared, open_sidecar
from fse_convert.sidecar.tensors import KernelTensorName
from fse_convert.testing.patch import flip_payload
from tests.layout import tensors
from tests.serving.sglang_standins import CONFIG, MODULE, Experts, Linear, SharedMlp, codes, loaded, never, raw, refused, served

GIB = 2**30


@pytest.mark.parametrize("target", ["sglang-0.5.23", "megamoe-512"])
def test_shared_experts_come_from_the_sidecar_and_the_originals_go(server, converted, target):
    out = converted(target)
    width = 384 if target == "sglang-0.5.23" else 512
    mlp = loaded(out)
    gate_up, down, scale = (
        raw(t.detach()).clone() for t in (mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.down_proj.weight_scale_inv)
    )
    served(out, SimpleNamespace(**{**vars(CONFIG), "moe_intermediate_size": width}))
    (l1, l1_scale), (l2, l2_scale) = hooks.around_shared(never, mlp)
    assert torch.equal(raw(l1), tensors.interleave(gate_up[:width], gate_up[width:]))
    assert torch.equal(raw(l2), down)
    down_scale = ue8m0.expand(ue8m0.from_fp32(scale.view(torch.float32)), 512, width, 32, 32)
    assert torch.equal(l2_scale.t(), tensors.l2_scale(down_scale))
    assert (l1.dtype, l1.shape, l1.stride()) == (torch.float8_e4m3fn, (2 * width, 512), (512, 1))
    assert (l1_scale.dtype, l1_scale.shape, l1_scale.stride()) == (torch.int32, (2 * width, 4), (1, 2 * width))
    assert (l2_scale.dtype, l2_scale.shape, l2_scale.stride()) == (torch.int32, (512, width // 128), (1, 512))
    assert [p.numel() for p in mlp.parameters()] == [0, 0, 0, 0]
    assert hooks.state.load.from_sidecar == [MODULE]
    assert (
        hooks.state.load.freed == 2 * width * 512 + 4 * (2 * width * 512 + 512 * width) // 1024
    )  # L1, and FP32 scales of 32x32 blocks


@pytest.mark.gpu
def test_on_a_gpu_the_tensors_are_the_same_and_the_memory_comes_back(server, converted):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = converted("sglang-0.5.23", "v4-flash", hidden=2048, width=1024)
    mlps = [requantised(loaded(out)).to(device) for device in ("cpu", "cuda")]
    before = torch.cuda.memory_allocated()
    served(out, SimpleNamespace(hidden_size=2048, moe_intermediate_size=1024, n_shared_experts=1))
    built = [[t for pair in hooks.around_shared(never, mlp) for t in pair] for mlp in mlps]
    for here, there in zip(*built, strict=True):
        assert there.device.type == "cuda"
        assert there.stride() == here.stride()
        assert torch.equal(raw(there).cpu(), raw(here))
    assert torch.cuda.memory_allocated() <= before + sum(t.nbytes for t in built[1] if t.dtype is torch.int32)


def test_without_a_sidecar_sglang_builds_and_the_originals_go_all_the_same(server, made, tmp_path):
    mlp = loaded(made())
    l1 = (mlp.gate_up_proj.weight.data.clone(), torch.zeros(4))
    l2 = (mlp.down_proj.weight.data, torch.zeros(4))
    kept = l2[0].clone()
    served(made())
    assert hooks.around_shared(lambda _mlp: (l1, l2), mlp) == (l1, l2)
    assert [p.numel() for p in mlp.parameters()] == [0, 0, 0, 0]
    assert torch.equal(raw(l2[0]), raw(kept)), "SGLang's tuple aliases the weight of down"
    assert hooks.state.load.freed == 768 * 512 + 4 * (768 * 512 + 512 * 384) // 1024
    assert not hooks.state.load.from_sidecar


def test_dummy_weights_take_nothing_from_a_sidecar(server, converted):
    served(None, loader="DummyModelLoader")
    pair = (torch.zeros(1), torch.zeros(1))
    assert hooks.around_shared(lambda _mlp: (pair, pair), loaded(converted())) == (pair, pair)


def test_strides_survive_one_column_of_scales():
    shared = KernelShared(
        torch.zeros(256, 128), torch.zeros(1, 256, dtype=torch.int32).t(), torch.zeros(128, 128), torch.zeros(1, 128).t()
    )
    assert modules.to_device(shared, "cpu").l1_scale.stride() == (1, 256)


@pytest.mark.parametrize(
    ("prefix", "layers", "expected"),
    [
        ("model.layers.3.mlp.shared_experts.gate_up_proj", ["layers.3.ffn.experts", "mtp.3.ffn.experts"], "layers.3.ffn.experts"),
        ("model.layers.0.mlp.shared_experts.gate_up_proj", ["layers.0.ffn.experts", "mtp.0.ffn.experts"], "layers.0.ffn.experts"),
        ("model.decoder.mlp.shared_experts.gate_up_proj", ["layers.0.ffn.experts", "mtp.0.ffn.experts"], "mtp.0.ffn.experts"),
        ("stages.2.mlp.shared_experts.gate_up_proj", ["layers.2.ffn.experts", "mtp.2.ffn.experts"], "mtp.2.ffn.experts"),
        ("mtp.0.mlp.shared_experts.gate_up_proj", ["layers.0.ffn.experts", "mtp.0.ffn.experts"], "mtp.0.ffn.experts"),
        ("model.decoder.mlp.shared_experts.gate_up_proj", ["mtp.0.ffn.experts", "mtp.1.ffn.experts"], "prefix-ambiguous"),
        ("model.decoder.mlp.shared_experts.gate_up_proj", ["layers.0.ffn.experts"], "prefix-ambiguous"),
        ("model.layers.3.mlp.shared_experts.gate_up_proj", ["layers.2.ffn.experts"], "prefix-missing"),
        ("model.layers.3.mlp.experts", ["layers.3.ffn.experts"], "prefix-unknown"),
        ("language_model.model.layers.3.mlp.shared_experts.gate_up_proj", ["layers.3.ffn.experts"], "prefix-unknown"),
    ],
)
def test_prefixes(prefix, layers, expected):
    if expected.startswith("prefix-"):
        with pytest.raises(NotServable, match=modules.SWITCH) as error:
            modules.checkpoint_prefix(prefix, layers)
        assert codes(error) == [expected]
    else:
        assert modules.checkpoint_prefix(prefix, layers) == expected


def test_a_model_of_another_width_is_refused_with_the_target(server, converted):
    served(converted("megamoe-512"))  # the model still says 384
    error = refused(loaded(converted()))
    assert codes(error) == ["width-mismatch"]
    assert "--target sglang-0.5.23" in str(error.value)


def test_padded_shared_experts_alone_are_refused_with_the_target(server, converted):
    out = converted("megamoe-512", "v4.1-flash", "--experts", "shared")
    served(out)
    assert "--target sglang-0.5.23" in str(refused(loaded(out)).value)


def test_a_module_of_another_shape_than_its_config_is_refused(server, converted):
    served(converted())
    error = refused(loaded(converted("megamoe-512")))
    assert codes(error) == ["width-mismatch"]
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "code"), [("hidden_size", 1024, "hidden-mismatch"), ("n_shared_experts", 2, "shared-count-mismatch")]
)
def test_a_model_with_other_sizes_is_refused(server, converted, key, value, code):
    served(converted(), SimpleNamespace(**{**vars(CONFIG), key: value}))
    assert code in codes(refused(loaded(converted())))


@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_other_weights_than_those_beside_it_are_refused(server, converted, which):
    mlp = loaded(converted())
    linear, row = {"gate": (mlp.gate_up_proj, 0), "up": (mlp.gate_up_proj, 383 + 384), "down": (mlp.down_proj, 511)}[which]
    linear.weight.data = linear.weight.data.clone()
    linear.weight.data[row].view(torch.uint8)[-1] ^= 1
    served(converted())
    assert codes(refused(mlp)) == ["sidecar-stale"]


@pytest.mark.parametrize("which", ["gate", "up", "down"])
def test_another_scale_than_those_beside_it_is_refused(server, converted, which):
    """One byte of E8M0, in the last block: the weights are the same, the values are not."""
    mlp = loaded(converted())
    linear, block = {"gate": (mlp.gate_up_proj, 11), "up": (mlp.gate_up_proj, 23), "down": (mlp.down_proj, 15)}[which]
    assert linear.weight_scale_inv.shape[0] in {24, 16}
    linear.weight_scale_inv.data = linear.weight_scale_inv.data.clone()
    linear.weight_scale_inv.data[block, -1] *= 2
    served(converted())
    assert codes(refused(mlp)) == ["sidecar-stale"]


@pytest.mark.parametrize("part", [KernelTensorName.L1_SCALE, KernelTensorName.L2_SCALE])
@pytest.mark.parametrize("place", [0, -1])
def test_another_scale_in_the_kernel_layout_is_refused(server, converted, part, place):
    """The other way round: a byte of ``fse/``, padding and all, against the scales just loaded."""
    shared = open_sidecar(converted()).tensors("layers.1.ffn.experts")
    names = dict(zip(KernelTensorName, shared._fields, strict=True))
    changed = getattr(shared, names[part]).t().clone()
    changed.view(torch.uint8).view(-1)[place] ^= 1
    with pytest.raises(NotServable) as error:
        modules.check_contents(loaded(converted()), shared._replace(**{names[part]: changed.t()}))
    assert codes(error) == ["sidecar-stale"]
    modules.check_contents(loaded(converted()), shared)


def test_scales_kept_as_bytes_are_compared_too(server, converted):
    mlp, shared = loaded(converted()), open_sidecar(converted()).tensors("layers.1.ffn.experts")
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        linear.weight_scale_inv = nn.Parameter(ue8m0.from_fp32(linear.weight_scale_inv.data), requires_grad=False)
    modules.check_contents(mlp, shared)
    mlp.down_proj.weight_scale_inv.data[0, 0] += 1
    with pytest.raises(NotServable):
        modules.check_contents(mlp, shared)


def test_another_layer_is_refused(server, converted):
    served(converted())
    assert codes(refused(loaded(converted(), "layers.0.ffn"))) == ["sidecar-stale"]


def test_a_download_without_the_manifest_is_refused(server, converted, tmp_path):
    out = shutil.copytree(converted(), tmp_path / "out")
    (out / "fse" / "manifest.json").unlink()
    served(out)
    error = refused(loaded(out))
    assert codes(error) == ["sidecar-incomplete"]
    assert "hf download" in str(error.value)


def test_a_folder_that_lost_its_index_or_a_byte_is_refused(server, converted, tmp_path):
    out = shutil.copytree(converted(), tmp_path / "index")
    (out / "fse" / "model.safetensors.index.json").unlink()
    served(out)
    error = refused(loaded(out))
    assert codes(error) == ["sidecar-incomplete"]
    assert modules.KEEP in str(error.value)
    out = shutil.copytree(converted(), tmp_path / "byte")
    (shard,) = (out / "fse").glob("*.safetensors")
    flip_payload(shard)
    served(out)
    assert codes(refused(loaded(out))) == ["sidecar-damaged"]


def test_an_index_without_shards_and_manifest_is_no_foreign_folder(server, converted, tmp_path):
    out = shutil.copytree(converted(), tmp_path / "out")
    for path in (out / "fse").iterdir():
        if path.name != "model.safetensors.index.json":
            path.unlink()
    served(out)
    assert codes(refused(loaded(out))) == ["sidecar-incomplete"]


@pytest.mark.parametrize("local", [True, False])
def test_shards_that_are_missing_count_in_a_folder_of_ones_own(server, converted, tmp_path, local):
    """By a hub id SGLang fetches what it wants into a snapshot, and has looked after itself."""
    out, mlp = shutil.copytree(converted(), tmp_path / "out"), loaded(converted())
    sorted(out.glob("*.safetensors"))[0].unlink()
    served(out, local=local)
    if local:
        assert codes(refused(mlp)) == ["shard-missing"]
    else:
        hooks.around_shared(never, mlp)
        assert hooks.state.load.from_sidecar == [MODULE]


def test_an_output_without_proof_is_taken_and_the_log_says_so_once(server, converted, caplog):
    out = converted("sglang-0.5.23", "v4.1-flash", "--verify", "none")
    served(out)
    with caplog.at_level("INFO"):
        hooks.around_shared(never, loaded(out))
        hooks.find_sidecar(hooks.state.load)
    assert caplog.text.count("--verify none") == 1
    assert str(out) in caplog.text


def test_a_foreign_folder_of_that_name_is_no_sidecar(server, made, tmp_path):
    out = shutil.copytree(made(), tmp_path / "out")
    (out / "fse").mkdir()
    served(out)
    assert hooks.find_sidecar(hooks.state.load) is None


def requantised(mlp: SharedMlp, *, change: int = 0) -> SharedMlp:
    """Do to 128x128 blocks what SGLang does on SM100: halve the scales, double the weights, pack a byte per row and 128 columns."""
    for linear in (mlp.gate_up_proj, mlp.down_proj):
        n, k = linear.weight.shape
        weight = (linear.weight.data.float() * 0.5).to(torch.float8_e4m3fn)
        exact = weight.float() * 2 == linear.weight.data.float()
        linear.weight.data = torch.where(exact, weight.float(), linear.weight.data.float() * 0.5).to(torch.float8_e4m3fn)
        per_row = (linear.weight_scale_inv.data * 2).repeat_interleave(128, 0)[:n]
        scale = torch.nn.functional.pad(ue8m0.from_fp32(per_row), (0, -(k // 128) % 4), value=127)
        linear.weight_scale_inv = nn.Parameter(scale.contiguous().view(torch.int32) + change, requires_grad=False)
    return mlp


def test_requantised_blocks_are_compared_by_value(server, converted):
    out = converted("sglang-0.5.23", "v4-flash")
    served(out)
    (l1, _), (l2, _) = hooks.around_shared(never, requantised(loaded(out)))
    assert torch.equal(raw(l2), raw(loaded(out).down_proj.weight.detach())), "the checkpoint's own bytes"
    assert l1.shape == (768, 512)


def test_requantised_blocks_of_other_weights_are_refused(server, converted):
    out = converted("sglang-0.5.23", "v4-flash")
    served(out)
    assert codes(refused(requantised(loaded(out), change=1))) == ["sidecar-stale"]


def test_weights_shuffled_for_flashinfer_are_not_compared(server, converted):
    mlp = loaded(converted())
    mlp.down_proj.weight_scale_inv_shuffled = torch.zeros(4)
    mlp.down_proj.weight.data = mlp.down_proj.weight.data.flip(0)
    served(converted())
    hooks.around_shared(never, mlp)
    assert mlp.down_proj.weight_scale_inv_shuffled.numel() == 0


def test_routed_scales_go_where_the_kernel_has_its_own(server):
    served(None, loader="DefaultModelLoader")
    experts = Experts(2, 512, 384)
    hooks.around_routed(lambda _e: None, experts)
    assert (experts.w13_weight_scale_inv.numel(), experts.w2_weight_scale_inv.numel()) == (0, 0)
    assert experts.mega_w13_weight_scale_utccp.shape == (2, 768, 4)
    assert hooks.state.load.freed == 4 * (2 * 768 * 4 + 2 * 512 * 3)
    hooks.around_routed(lambda _e: None, experts)  # SGLang's builder returns early the second time
    assert hooks.state.load.freed == 4 * (2 * 768 * 4 + 2 * 512 * 3)


@pytest.mark.parametrize("kind", ["earlier release", "nvfp4", "w4a4", "no tuples", "other tuples"])
def test_routed_scales_stay_where_something_may_read_them(server, kind):
    experts = Experts(2, 512, 384, registered=kind != "earlier release")
    experts._mega_moe_nvfp4, experts._mega_moe_w4a4 = kind == "nvfp4", kind == "w4a4"
    if kind == "no tuples":
        del experts.mega_l1_weights
    if kind == "other tuples":
        experts.mega_l2_weights = (torch.empty(0), torch.empty(2, 512, 3, dtype=torch.int32))
    served(None)
    server.leaves["weight_cache_mode"] = "client"  # a mode that would be refused
    hooks.around_routed(lambda _e: None, experts)
    assert experts.w13_weight_scale_inv.numel()
    assert hooks.state.load.freed == 0


@pytest.mark.parametrize(
    ("h", "i", "layers", "experts", "block", "expected"),
    [(5120, 2304, 40, 384, 32, (0.88, 1.98)), (4096, 2048, 43, 256, 128, (0.67, 1.01)), (7168, 3072, 61, 384, 128, (2.5, 5.63))],
    ids=["V4.1-Flash", "V4-Flash", "V4-Pro"],
)
def test_what_it_frees_on_eight_ranks(h, i, layers, experts, block, expected):
    """The figures of examples/serve_sglang.md, in GiB per rank: shared gate and up, and the scales of the routed experts."""
    fp8, f32 = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}
    gate_up = Linear(torch.empty(2 * i, h, **fp8), torch.empty(2 * i // block, h // block, **f32), MODULE)
    down = Linear(torch.empty(h, i, **fp8), torch.empty(h // block, i // block, **f32))
    shared = layers * modules.free_shared(SharedMlp(gate_up, down), ()) / GIB
    routed = layers * modules.free_routed(Experts(experts // 8, h, i)) / GIB
    assert (round(shared, 2), round(routed, 2)) == expected
    assert shared == pytest.approx(layers * (2 * i * h + 4 * 3 * i * h // block**2) / GIB)
    assert routed == pytest.approx(layers * experts / 8 * 3 * i * h / 32 / GIB)


def test_autotuning_skips_what_is_gone():
    linear = Linear(torch.empty(64, 64, dtype=torch.float8_e4m3fn), torch.empty(2, 2), MODULE)
    linear.block_fp8_mxfp8_ready = True
    modules.free_shared(SharedMlp(linear, Linear(torch.empty(64, 32), torch.empty(2, 1))), ())
    assert linear.block_fp8_mxfp8_ready is False


def test_the_sidecar_is_let_go(server, converted):
    served(converted())
    hooks.around_shared(never, loaded(converted()))
    sidecar = hooks.find_sidecar(hooks.state.load)
    assert sidecar is not None
    assert sidecar._handles
    hooks.after_load(None, nn.Linear(1, 1), "cpu")
    assert not sidecar._handles
    assert open_sidecar(converted()).layers == sidecar.layers
