"""Values of a weight as transformers decodes them, and every format or scale that is not read, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import write_index
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ktinject.checkpoints.checkpoint import Checkpoint, open_reader
from ktinject.checkpoints.formats import base, table
from ktinject.checkpoints.formats.base import Format, check_finite
from ktinject.checkpoints.formats.table import READ
from ktinject.checkpoints.formats.unsupported import Unsupported
from ktinject.errors import CheckpointError

KEY = "model.layers.3.mlp.experts.7.gate_proj.weight"
SCALE = KEY + "_scale_inv"


def write(
    folder: Path, weight: torch.Tensor, scale: torch.Tensor | None = None, config: Any = None
) -> Checkpoint:
    return write_all(folder, {KEY: weight} if scale is None else {KEY: weight, SCALE: scale}, config)


def write_all(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder, config)


def fp8(*shape: int) -> torch.Tensor:
    """All 254 finite values, in no order."""
    values = torch.arange(256, dtype=torch.uint8)
    values = values[(values & 127) != 127]
    picks = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values[picks].view(torch.float8_e4m3fn)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 1e-3


def reference(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """One element at a time would do; this is the same with each scale repeated over its block."""
    n, k = weight.shape[-2:]
    grid = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :n, :k]
    return weight.float() * grid


@pytest.mark.parametrize(
    "name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_floats_come_as_they_are(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4).to(dtype)
    with write(tmp_path, weight=weight) as checkpoint:
        exact = ("bf16",) if name == "bf16" else ()
        assert checkpoint.format_of(KEY) == Format(name, exact_in=exact)
        assert checkpoint.decode(KEY).equal(weight) and checkpoint.decode(KEY).dtype == dtype
        assert checkpoint.decode(KEY, 1).equal(weight[1])


@pytest.mark.parametrize(
    "shape", [(256, 384), (128, 128), (200, 300), (1, 1), (129, 127), (127, 129), (0, 5), (5, 0)]
)
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_fp8_is_the_exact_product(shape: tuple[int, int], block: tuple[int, int], tmp_path: Path) -> None:
    n, k = shape
    weight, scale = fp8(n, k), scales(-(-n // block[0]), -(-k // block[1]))
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    with write(tmp_path, weight=weight, scale=scale, config=config) as checkpoint:
        assert checkpoint.format_of(KEY) == Format("fp8_blocks", (SCALE,), block, encoding="fp8")
        got = checkpoint.decode(KEY)
        assert got.dtype == torch.float32 and got.is_contiguous()
        assert got.equal(reference(weight, scale, block))


def test_fp8_as_transformers_decodes_it(tmp_path: Path) -> None:
    weight, scale = fp8(384, 256), scales(3, 2)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    with write(tmp_path, weight=weight, scale=scale) as checkpoint:
        assert checkpoint.decode(KEY).equal(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_every_exact_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    weight, scale = fp8(130, 130), scales(2, 2).to(dtype)
    with write(tmp_path, weight=weight, scale=scale) as checkpoint:
        assert checkpoint.decode(KEY).equal(reference(weight, scale, (128, 128)))


def test_one_expert_of_a_stacked_fp8_tensor(tmp_path: Path) -> None:
    key = "model.layers.3.mlp.experts.gate_up_proj"
    weight, scale = fp8(3, 140, 260), scales(3, 2, 3)
    with write_all(tmp_path, {key: weight, f"{key}_scale_inv": scale}) as checkpoint:
        whole = checkpoint.decode(key)
        assert whole.equal(reference(weight, scale, (128, 128)))
        assert checkpoint.decode(key, 2).equal(whole[2])


def test_scales_are_no_weights_of_their_own(tmp_path: Path) -> None:
    with write(tmp_path, fp8(128, 128), scales(1, 1)) as checkpoint:
        assert checkpoint.weights == {KEY} and checkpoint.tensors_of(KEY) == (KEY, SCALE)


def test_an_index_alone_tells_fp8_from_floats(tmp_path: Path) -> None:
    write_index(tmp_path, dict.fromkeys((KEY, SCALE, "norm.weight"), "one.safetensors"))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.format_of(KEY) == Format("fp8_blocks", (SCALE,), (128, 128), encoding="fp8")
        assert checkpoint.format_of("norm.weight") == Format("float")
        with pytest.raises(CheckpointError, match="only the index is there"):
            checkpoint.decode(KEY)
    with Checkpoint.open(tmp_path, {"quant_method": "fp8", "weight_block_size": [1, 32]}) as checkpoint:
        form = checkpoint.format_of(KEY)
        assert (form.name, form.encoding, form.group_size) == ("mxfp8", "mxfp8", 32)


# Refusals


@pytest.mark.parametrize(
    "grid, block, expected",
    [
        ((2, 2), None, "[2, 3]"),
        ((3, 2), None, "[2, 3]"),
        ((6,), None, "[2, 3]"),
        ((), None, "[2, 3]"),
        ((1, 2, 3), None, "[2, 3]"),
        ((2, 3), (64, 128), "[4, 3]"),
        ((2, 3), (128, 64), "[2, 5]"),
    ],
)
def test_a_scale_grid_that_does_not_fit(grid: Any, block: Any, expected: str, tmp_path: Path) -> None:
    config = {"weight_block_size": block} if block else None
    with write(tmp_path, weight=fp8(200, 300), scale=torch.ones(grid), config=config) as checkpoint:
        for call in (checkpoint.format_of, checkpoint.decode):
            with pytest.raises(CheckpointError) as caught:
                call(KEY)
            message = str(caught.value)
            assert f"'{SCALE}'" in message and str(tmp_path) in message
            assert f"grid of {list(grid)}; {expected} is needed for [200, 300]" in message


def test_a_block_of_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    weight, scale = fp8(200, 300), torch.ones(2, 3)
    scale[1, 2] = 0
    with write(tmp_path, weight=weight, scale=scale) as checkpoint:
        assert checkpoint.decode(KEY).equal(reference(weight, scale, (128, 128)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_scales_must_be_positive_and_finite(value: float, tmp_path: Path) -> None:
    scale = torch.ones(2, 3)
    scale[1, 2] = value
    with write(tmp_path, weight=fp8(200, 300), scale=scale) as checkpoint:
        checkpoint.format_of(KEY)
        with pytest.raises(
            CheckpointError, match=rf"{SCALE}': {value} at \[1, 2\]; scales must be positive"
        ) as caught:
            checkpoint.decode(KEY)
        # Nobody wrote a sign into a file by a broken download.
        assert ("Download" in str(caught.value)) == (not value < 0)


@pytest.mark.parametrize(
    "block", [128, [128], [128, 0], [128, -128], [128, 128.0], [128, True], "128", [1, 2, 3]]
)
def test_block_sizes_that_mean_nothing(block: Any, tmp_path: Path) -> None:
    config = {"weight_block_size": block}
    with write(tmp_path, weight=fp8(128, 128), scale=torch.ones(1, 1), config=config) as checkpoint:
        with pytest.raises(CheckpointError, match=r"weight_block_size is .*two positive integers"):
            checkpoint.format_of(KEY)


@pytest.mark.parametrize(
    "weight, scale, words",
    [
        (torch.ones(128, 128).bfloat16(), torch.ones(1, 1), "BF16 [128, 128] with block scales"),
        (torch.ones(128, 128).to(torch.int8), torch.ones(1, 1), "I8 [128, 128] with block scales"),
        (torch.ones(128, 128).to(torch.float8_e5m2), torch.ones(1, 1), "F8_E5M2 [128, 128] with block"),
        (fp8(128), torch.ones(1), "F8_E4M3 [128] with block scales"),
        (fp8(128, 128), torch.ones(1, 1).to(torch.int8), "scales of dtype I8"),
        (fp8(128, 128), torch.ones(1, 1).double(), "scales of dtype F64"),
    ],
)
def test_dtypes_that_do_not_belong_together(
    weight: torch.Tensor, scale: torch.Tensor, words: str, tmp_path: Path
) -> None:
    with write(tmp_path, weight=weight, scale=scale) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.format_of(KEY)
        assert words in str(caught.value) and "Read are bf16" in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.uint8, torch.float64]
)
def test_dtypes_that_are_not_weights_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    with write(tmp_path, weight=torch.ones(4, 4).to(dtype)) as checkpoint:
        with pytest.raises(
            CheckpointError,
            match=rf"{KEY}': dtype \w+ is not that of a weight without scales\. Read are bf16",
        ):
            checkpoint.format_of(KEY)


TELLS = Unsupported(READ).found


# What is stored in two tensors at least, so that one alone tells that the other is absent.
@pytest.mark.parametrize("suffix", TELLS)
@pytest.mark.parametrize("complete", [True, False])
def test_other_formats_are_refused_by_name(suffix: str, complete: bool, tmp_path: Path) -> None:
    companion = KEY.removesuffix(".weight") + suffix
    if complete:
        checkpoint = write_all(tmp_path, {companion: torch.ones(2), KEY: torch.ones(2)})
    else:
        write_index(tmp_path, {companion: "one.safetensors"})
        checkpoint = Checkpoint.open(tmp_path)
    with checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.format_of(KEY)
    message = str(caught.value)
    assert f"{TELLS[suffix]}, to which '{companion}' belongs, is not read or not whole here" in message
    assert f"tensor '{KEY}'" in message and str(tmp_path) in message


def test_a_weight_that_is_not_there(tmp_path: Path) -> None:
    with write(tmp_path, weight=torch.ones(2)) as checkpoint:
        with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight': not in the checkpoint"):
            checkpoint.format_of("model.norm.weight")


def test_no_rows_of_an_fp8_matrix(tmp_path: Path) -> None:
    with write(tmp_path, weight=fp8(128, 128), scale=torch.ones(1, 1)) as checkpoint:
        with pytest.raises(CheckpointError, match="no expert 1 in a matrix"):
            checkpoint.decode(KEY, 1)


# Values


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("position", [(0, 0), (2, 4), (1, 3)])
def test_the_first_value_that_is_not_finite_is_named(
    dtype: torch.dtype, position: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_CHECK_ELEMENTS", 4)
    tensor = torch.ones(3, 5)
    check_finite("w", tensor.to(dtype))
    tensor[position] = tensor[2, 4] = float("nan")
    with pytest.raises(CheckpointError, match=rf"'w': .*nan.* at \[{position[0]}, {position[1]}\]"):
        check_finite("w", tensor.to(dtype))


def test_infinity_is_not_finite() -> None:
    with pytest.raises(CheckpointError, match=r"'w': -inf at \[1\]"):
        check_finite("w", torch.tensor([1.0, -float("inf")]))
    with pytest.raises(CheckpointError, match=r"'w': inf at \[\]"):
        check_finite("w", torch.tensor(float("inf")))


def test_integers_and_nothing_are_finite() -> None:
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.empty(0, 4)):
        check_finite("w", tensor)


# MXFP4


def mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [*shape, 16] and scales [*shape] as gpt-oss has them, of every code."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 130, shape, dtype=torch.uint8)


MX_KEY = "model.layers.3.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_as_transformers_decodes_it(dtype: torch.dtype, tmp_path: Path) -> None:
    blocks, scale = mxfp4(3, 12, 5)
    theirs = convert_moe_packed_tensors(blocks.clone(), scale.clone())
    tensors = {f"{MX_KEY}_blocks": blocks, f"{MX_KEY}_scales": scale.view(dtype)}
    with write_all(tmp_path, tensors) as checkpoint:
        assert checkpoint.weights == {MX_KEY}
        assert checkpoint.shape(MX_KEY) == (3, 160, 12) == theirs.shape
        whole = checkpoint.decode(MX_KEY)
        assert whole.dtype == torch.bfloat16 and whole.equal(theirs)
        assert checkpoint.decode(MX_KEY, 2).equal(whole[2])


def test_an_index_alone_tells_mxfp4(tmp_path: Path) -> None:
    write_index(tmp_path, dict.fromkeys((f"{MX_KEY}_blocks", f"{MX_KEY}_scales"), "one.safetensors"))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.format_of(MX_KEY).name == "mxfp4"


@pytest.mark.parametrize(
    "blocks, scale, words",
    [
        (torch.zeros(3, 12, 5, 8, dtype=torch.uint8), None, r"U8 \[3, 12, 5, 8\]; U8 \[\.\.\., outputs"),
        (torch.zeros(3, 12, 5, 16, dtype=torch.int8), None, r"I8 \[3, 12, 5, 16\]; U8"),
        (
            torch.zeros(3, 12, 5, 16, dtype=torch.uint8),
            (3, 12, 4),
            r"_scales'.*U8 \[3, 12, 4\]; U8 \[3, 12, 5\]",
        ),
    ],
)
def test_mxfp4_that_does_not_fit(blocks: torch.Tensor, scale: Any, words: str, tmp_path: Path) -> None:
    scales = torch.zeros(scale or blocks.shape[:-1], dtype=torch.uint8)
    with write_all(tmp_path, {f"{MX_KEY}_blocks": blocks, f"{MX_KEY}_scales": scales}) as checkpoint:
        with pytest.raises(CheckpointError, match=words):
            checkpoint.format_of(MX_KEY)


def test_mxfp4_scales_that_are_no_number(tmp_path: Path) -> None:
    blocks, scale = mxfp4(3, 12, 5)
    scale[1, 2, 4] = 255
    with write_all(tmp_path, {f"{MX_KEY}_blocks": blocks, f"{MX_KEY}_scales": scale}) as checkpoint:
        with pytest.raises(
            CheckpointError, match=r"_scales': 255 at \[1, 2, 4\]; scales must be at most 252"
        ):
            checkpoint.decode(MX_KEY)
        assert checkpoint.decode(MX_KEY, 0).isfinite().all()


def test_blocks_without_scales_are_named(tmp_path: Path) -> None:
    with write_all(tmp_path, {f"{MX_KEY}_blocks": mxfp4(3, 12, 5)[0]}) as checkpoint:
        with pytest.raises(CheckpointError, match="MXFP4 as gpt-oss has it, to which"):
            checkpoint.format_of(MX_KEY)


NAMES_OF_FORMATS = {
    **{
        f"{type(source).__name__} {number}": [f"x.y{suffix}" for suffix in (*own.needed, *own.optional)]
        for source in READ
        for number, own in enumerate(source.own)
    },
    **{f"{suffix} alone": [f"x.y{suffix}"] for suffix in Unsupported(READ).found},
    **{f"{suffix} of a weight": [f"x.y{suffix}", "x.y.weight"] for suffix in Unsupported(READ).found},
    "plain": ["x.y.weight", "y", "x.y.bias"],
}


@pytest.mark.parametrize("case", NAMES_OF_FORMATS)
def test_formats_that_no_name_tells_of_are_not_asked(case: str, tmp_path: Path) -> None:
    """What is found in the formats that may be there is what is found in all of them."""
    names = [*NAMES_OF_FORMATS[case], "model.embed_tokens.weight"]
    write_index(tmp_path, dict.fromkeys(names, "model-1.safetensors"))
    reader = open_reader(tmp_path, {})
    some = table.sources_in(reader)
    assert len(some) < len(table.SOURCES)
    assert table.weight_names(reader, some) == table.weight_names(reader)
    for key in {*names, "x.y.weight", "x.y"} & {*names, *table.weight_names(reader)}:
        assert table.find(reader, key, some) == table.find(reader, key)


def test_a_plain_checkpoint_is_asked_for_few_formats(tmp_path: Path) -> None:
    write_index(tmp_path, {"a.weight": "model-1.safetensors", "b.bias": "model-1.safetensors"})
    kinds = {type(source).__name__ for source in table.sources_in(open_reader(tmp_path, {}))}
    assert kinds == {"MadeOfParts", "GgufBlocks", "Floats"}
