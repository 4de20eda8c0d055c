"""Storage formats as headers alone show them, and things that only look alike told apart."""

from __future__ import annotations

import pytest

from fse_convert.checkpoint.header import TensorInfo
from fse_convert.layout.nan_and_one import NaN
from fse_convert.model.formats import Format, FormatError, StorageKind, Tile, read_format
from fse_convert.testing.memory import matrix

N, K = 256, 512


def parts(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {suffix: TensorInfo(f"m.{suffix}", "s", dtype, shape, 0, 0) for suffix, (dtype, shape) in tensors.items()}


def read(store: str, hint: tuple[int, int] | None = None, n: int = N, k: int = K) -> Format:
    return read_format(parts(**matrix(store, n, k)), hint)


@pytest.mark.parametrize(
    ("store", "kind", "block", "label"),
    [
        ("bf16", StorageKind.PLAIN, None, "BF16"),
        ("f16", StorageKind.PLAIN, None, "F16"),
        ("fp8-128", StorageKind.FP8_BLOCK, (128, 128), "FP8 128x128 E8M0"),
        ("fp8-32", StorageKind.FP8_BLOCK, (32, 32), "FP8 32x32 E8M0"),
        ("fp8-32-u8", StorageKind.FP8_BLOCK, (32, 32), "FP8 32x32 E8M0 (U8)"),
        ("fp8-128-f32", StorageKind.FP8_BLOCK, (128, 128), "FP8 128x128 F32"),
        ("fp8-128-bf16", StorageKind.FP8_BLOCK, (128, 128), "FP8 128x128 BF16"),
        ("mxfp8", StorageKind.FP8_BLOCK, (1, 32), "MXFP8"),
        ("mxfp8-u8", StorageKind.FP8_BLOCK, (1, 32), "MXFP8 (U8 scales)"),
        ("fp8-pb-wo", StorageKind.FP8_BLOCK, (128, 128), "FP8 128x128 F32"),
        ("fp8-tensor", StorageKind.FP8_TENSOR, None, "FP8 per tensor"),
        ("fp8-channel", StorageKind.FP8_CHANNEL, None, "FP8 per channel"),
        ("mxfp4", StorageKind.MXFP4, (1, 32), "MXFP4"),
        ("mxfp4-u8", StorageKind.MXFP4, (1, 32), "MXFP4"),
        ("mxfp4-packed", StorageKind.MXFP4, (1, 32), "MXFP4"),
        ("nvfp4", StorageKind.NVFP4, (1, 16), "NVFP4"),
        ("nvfp4-packed", StorageKind.NVFP4, (1, 16), "NVFP4"),
    ],
)
def test_a_format_is_read_from_dtypes_and_shapes(store: str, kind: StorageKind, block: tuple[int, int] | None, label: str) -> None:
    f = read(store)
    assert (f.kind, f.block, f.label, f.shape) == (kind, block, label, (N, K))
    assert set(f.tiles) == set(matrix(store, N, K))
    assert all(f.tiles[s] is None for s in f.tiles if s.endswith(("_2", "input_scale", "global_scale")))


@pytest.mark.parametrize("store", ["fp8-128", "fp8-32", "fp8-pb-wo", "mxfp8", "fp8-channel", "mxfp4", "nvfp4", "bf16"])
def test_tiles_explain_every_stored_shape(store: str) -> None:
    f, stored = read(store), matrix(store, N, K)
    for suffix, tile in f.tiles.items():
        if tile is not None:
            assert stored[suffix][1] == tile.stored(N, K, len(stored[suffix][1]))


@pytest.mark.parametrize(
    ("tile", "dimensions", "shape"),
    [
        (Tile(1, 1, b"", None), 2, (300, 200)),
        (Tile(1, 2, b"", None), 2, (300, 100)),
        (Tile(128, 128, b"", None), 2, (3, 2)),
        (Tile(128, 128, b"", None), 4, (3, 1, 2, 1)),
        (Tile(1, 0, b"", None), 2, (300, 1)),
        (Tile(1, 0, b"", None), 1, (300,)),
    ],
)
def test_a_tile_tells_the_stored_shape_of_any_matrix(tile: Tile, dimensions: int, shape: tuple[int, ...]) -> None:
    assert tile.stored(300, 200, dimensions) == shape


def test_modelopts_scales_of_four_dimensions_mean_blocks_of_128_however_few_there_are() -> None:
    small = parts(weight=("F8_E4M3", (96, 64)), weight_scale=("F32", (1, 1, 1, 1)))
    assert read_format(small).block == (128, 128)
    with pytest.raises(FormatError, match="found"):
        read_format(parts(weight=("F8_E4M3", (N, K)), weight_scale=("F32", (2, 2, 4, 1))))


def test_the_element_that_pads_is_zero_for_weights_and_one_for_scales() -> None:
    assert read("fp8-32").tiles == {"weight": Tile(1, 1, b"\0", NaN.E4M3), "scale": Tile(32, 32, b"\x7f", NaN.E8M0)}
    assert read("mxfp4").tiles == {"weight": Tile(1, 2, b"\0", None), "scale": Tile(1, 32, b"\x7f", NaN.E8M0)}
    assert read("fp8-128-f32").tiles["weight_scale_inv"] == Tile(128, 128, b"\0\0\x80\x3f", NaN.F32)
    assert read("fp8-128-bf16").tiles["weight_scale"] == Tile(128, 128, b"\x80\x3f", NaN.BF16)
    assert read("nvfp4").tiles["weight_scale"] == Tile(1, 16, b"\x38", NaN.E4M3)


@pytest.mark.parametrize(
    ("store", "code", "says"),
    [
        ("ascend-int8", "part-unknown", "weight_offset"),
        ("int4-packed", "dtype-unsupported", "I32"),
        ("gptq", "format-unknown", "qweight"),
        ("mlx", "dtype-unsupported", "U32"),
    ],
)
def test_formats_that_are_not_supported_are_named(store: str, code: str, says: str) -> None:
    with pytest.raises(FormatError) as e:
        read(store)
    assert e.value.problem.code == code
    assert says in f"{e.value.problem.where} {e.value}"


@pytest.mark.parametrize(
    "scale", [("F32", (N, 1)), ("F32", (N,)), ("F8_E8M0", (N, K // 32)), ("U8", (N, K // 32)), ("BF16", (N, K // 16))]
)
def test_eight_bit_integers_are_not_packed_fp4(scale: tuple[str, tuple[int, ...]]) -> None:
    """Ascend's int8 has the dtype of packed FP4; the scale's shape tells them apart."""
    with pytest.raises(FormatError) as e:
        read_format(parts(weight=("I8", (N, K)), weight_scale=scale))
    assert e.value.problem.code == "scale-geometry"
    assert "neither MXFP4 nor NVFP4" in e.value.problem.message


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"weight": ("F8_E4M3", (N, K))}, "scale-missing"),
        ({"weight": ("I8", (N, K))}, "scale-missing"),
        ({"scale": ("F8_E8M0", (2, 4))}, "weight-missing"),
        ({"weight": ("BF16", (N, K)), "scale": ("F32", (2, 4))}, "scale-unexpected"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F32", (2, 4)), "weight_scale": ("F32", (2, 4))}, "part-ambiguous"),
        ({"weight": ("F8_E4M3", (N, K)), "weight_packed": ("U8", (N, K))}, "part-ambiguous"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F8_E8M0", (3, 4))}, "scale-geometry"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F8_E8M0", (2, 4, 1))}, "scale-geometry"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F16", (2, 4))}, "scale-dtype"),
        ({"weight": ("F8_E5M2", (N, K)), "scale": ("F32", (2, 4))}, "dtype-unsupported"),
        ({"weight": ("BF16", (4, N, K))}, "weight-shape"),
        ({"weight": ("BF16", (N, 0))}, "tensor-empty"),
        ({"weight": ("BF16", (0,))}, "tensor-empty"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F32", (0,))}, "tensor-empty"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F32", (2, 4)), "input_scale": ("F32", (0,))}, "tensor-empty"),
        ({"weight": ("F8_E4M3", (N, K)), "scale": ("F32", (2, 4)), "bias": ("BF16", (N,))}, "part-unknown"),
        ({"weight": ("U8", (N, K)), "weight_scale": ("F8_E4M3", (N, K // 16))}, "scale-geometry"),
    ],
)
def test_headers_that_make_no_format(tensors: dict[str, tuple[str, tuple[int, ...]]], code: str) -> None:
    with pytest.raises(FormatError) as e:
        read_format(parts(**tensors))
    assert e.value.problem.code == code


@pytest.mark.parametrize(
    ("shape", "hint"), [((N * K,), "in their full shapes"), ((), "in their full shapes"), ((4, N, K), "3-D experts")]
)
def test_what_no_matrix_is_told_by_its_dimensions(shape: tuple[int, ...], hint: str) -> None:
    with pytest.raises(FormatError) as e:
        read_format(parts(weight=("BF16", shape)))
    assert (e.value.problem.code, hint in e.value.problem.hint) == ("weight-shape", True)


def test_a_partial_last_block_needs_the_configs_block_only_where_it_is_ambiguous() -> None:
    assert read("fp8-128", n=320, k=200).block == (128, 128)
    small = parts(weight=("F8_E4M3", (40, 512)), scale=("F8_E8M0", (1, 4)))
    assert read_format(small).block == (40, 128)
    assert read_format(small, (128, 128)).block == (128, 128)
    odd = parts(weight=("F8_E4M3", (257, 513)), scale=("F8_E8M0", (3, 5)))
    assert read_format(odd).block == (128, 128)


def test_the_config_is_not_believed_against_the_headers() -> None:
    assert read("fp8-32", (128, 128)).block == (32, 32)
    assert read("mxfp8", (128, 128)).block == (1, 32)
    assert read("fp8-channel", (128, 128)).kind is StorageKind.FP8_CHANNEL
    for shape in ((3, 4), (4, 32), (2, 2)):
        with pytest.raises(FormatError):
            read_format(parts(weight=("F8_E4M3", (N, K)), scale=("F8_E8M0", shape)), (32, 32))


def test_one_scale_per_row_is_a_block_where_the_config_says_so() -> None:
    rows = parts(weight=("F8_E4M3", (N, 128)), weight_scale=("F32", (N, 1)))
    assert read_format(rows).kind is StorageKind.FP8_CHANNEL
    assert read_format(rows, (1, 128)).block == (1, 128)


def test_formats_of_one_storage_differ_in_shape_only() -> None:
    assert read("fp8-32").same_storage == read("fp8-32", n=64).same_storage
    assert read("fp8-32").same_storage != read("fp8-32-u8").same_storage
