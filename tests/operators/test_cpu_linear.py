"""cpu_linear beside nn.Linear: every kernel, shape and dtype; then whole models with all their linears swapped."""

from __future__ import annotations

import copy
import json
import math
import operator as operator_module
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from trained import trained_model

import ktinject
from ktinject import OperatorError, PlanError, _native
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Codes, Format, Fp8Blocks, Nvfp4
from ktinject.machine import detect
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from ktinject.operators.expert_formats import K_QUANTS
from ktinject.tools import evaluate
from tests.models import tiny
from tests.reference import multiplied, relative_error, rounding, to_bf16, to_int8

GOLDEN = Path(__file__).parents[1] / "ktinject/checkpoints/golden"

# Relative error of one product against the original weights; those of the experts, which are two products, are in
# reference.py. Seen: 2.5e-3, 1.2e-2, 0.11 for groups of 32.
TOLERANCE = {
    "bf16": 4e-3,
    "int8": 2e-2,
    "int4": 0.14,
    "fp8": 4e-2,
    "mxfp4": 0.14,
    "fp8_channel": 4e-2,
    "nvfp4": 0.14,
    "mxfp8": 4e-2,
}
# Against the unpacked weights and activations rounded as the kernels round them: fp32 sums remain, and for int4 on
# AMX the second rounding of the weights, to the int8 grid of their column. Seen: 3e-7 and 5e-3.
EMULATED = {"exact": 1e-5, "amx_int4": 1e-2}
# K-quants come from GGUF files alone: tests/ktinject/loading/test_k_quants.py.
KERNELS = [row for row in _native.kernels() if row["available"] and row["weights"] not in K_QUANTS]


def linear(n: int, k: int, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    layer.weight.normal_(std=k**-0.5)
    return layer


def swapped(layer: nn.Linear, **arguments: Any) -> CpuLinear:
    operator = CpuLinear.build(layer, CpuLinearConfig(device="cpu", **arguments))
    operator.allocate()
    for name, parameter in layer.named_parameters():
        operator.load(name, parameter, None, None)
    operator.finish()
    return operator


@pytest.mark.parametrize("m", [1, 2, 5, 16, 37, 300])
@pytest.mark.parametrize("n,k,bias", [(1, 1, True), (33, 100, True), (96, 257, False), (256, 64, True)])
@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row["name"])
def test_every_kernel(row: dict[str, Any], n: int, k: int, bias: bool, m: int) -> None:
    if m > 100 and row["name"].startswith(("reference", "modelled")):
        pytest.skip("slow, and the rows beyond the first block are the same code")
    weights = row["weights"]
    operator = swapped(linear(n, k, bias), weights=weights, group_size=32, kernel=row["name"])
    x = torch.randn(m, k)
    rounded = to_bf16(x) if rounding(weights) == "bf16" else to_int8(x)
    want = rounded @ multiplied(operator.unpack("weight"), weights).T + (
        operator.unpack("bias").double() if bias else 0
    )
    limit = EMULATED["amx_int4" if "amx_int4" in row["name"] else "exact"]
    assert relative_error(operator(x), want) <= limit


@pytest.mark.parametrize("weights", TOLERANCE)
def test_close_to_the_layer_it_replaces(weights: str) -> None:
    layer = linear(200, 320, bias=True)
    operator = swapped(layer, weights=weights, group_size=32)
    x = torch.randn(9, 320)
    assert relative_error(operator(x), layer(x)) <= TOLERANCE[weights]
    assert relative_error(operator.weight, layer.weight) <= TOLERANCE[weights]
    assert torch.equal(operator.bias, layer.bias)


# What formats of checkpoints are kept as; of those in no format of the kernels, bf16.
KEPT = {
    "awq": ("int4 group 32 with zero points", "kept, scales rounded to bf16"),
    "fp8_block": ("bf16", "rounded to bf16"),  # 16 × 64
    "fp8_channel": ("fp8_channel", "kept"),
    "fp8_tensor": ("fp8", "kept"),
    "gptq4": ("int4 group 32", "kept, scales rounded to bf16"),
    "gptq4_zeros": ("int4 group 64 with zero points", "kept, scales rounded to bf16"),
    "gptq8": ("q8_0", "kept"),
    "gptq8_zeros": ("bf16", "rounded to bf16"),
    "int8_channel": ("int8", "kept"),
    "int8_group": ("q8_0", "kept, scales rounded to fp16"),
    "int8_zeros": ("bf16", "rounded to bf16"),
    "modelopt_nvfp4": ("nvfp4", "kept"),
    "mxfp4": ("mxfp4", "exact"),
    "mxfp8": ("mxfp8", "kept"),
    "nvfp4": ("nvfp4", "kept, 1 / scale rounded to fp32"),
    "packed4": ("int4 group 32", "kept"),
    "packed4_channel": ("int4 group 128", "kept"),
    "packed4_zeros": ("int4 group 32 with zero points", "kept"),
    "packed8": ("q8_0", "kept, scales rounded to fp16"),
    "packed8_zeros": ("bf16", "rounded to bf16"),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.safetensors")))
def test_a_checkpoints_own_format_is_kept(name: str, tmp_path: Path) -> None:
    """Files of the libraries that define the formats: `kept` has their values, and multiplies by them."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    values = tensors.pop("values")
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors")
    n, k = values.shape
    with Checkpoint.open(tmp_path, config) as checkpoint:
        form = checkpoint.format_of("x.weight")
        kept = CpuLinearConfig(device="cpu", weights="kept")
        if form.is_taken(CpuLinear.native_formats):
            kept = CpuLinear.use_checkpoint_format(kept, form)
        operator = CpuLinear.build(nn.Linear(k, n, bias=False), kept)
        weights, word = KEPT[name]
        assert (operator.describe()["weights"], operator.keeping(form)) == (weights, word)
        operator.allocate()
        is_stored = form.is_taken(operator.native_formats)
        assert is_stored == word.startswith("kept")
        if is_stored:
            operator.load_stored("weight", checkpoint.stored("x.weight"), None, None)
        else:
            operator.load("weight", checkpoint.decode("x.weight"), None, None)
    operator.finish()
    found = operator.unpack("weight")
    if word in ("kept", "exact"):
        assert found.to(values.dtype).equal(values)
    else:
        last_place = 2**-22 if "fp32" in word else 2**-8
        values = values.float()
        assert bool(((found - values).abs() <= values.abs() * (last_place + 2**-8)).all())
    x = torch.randn(21, k)
    want = (
        reference.rounded(x, rounding(operator.config.weights)) @ multiplied(found, operator.config.weights).T
    )
    limit = EMULATED["amx_int4" if "amx_int4" in operator.native.kernels[0] else "exact"]
    assert relative_error(operator(x), want) <= limit
    assert relative_error(operator(x[:1]), want[:1]) <= limit


def test_codes_in_groups_become_q8_0() -> None:
    """bf16 scales of 2^-17 and more are exact; larger groups have theirs several times. The rest is refused."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (40, 256), dtype=torch.uint8)
    scales = (torch.rand(40, 4) + 0.5).bfloat16() * torch.tensor([1, 2**-8, -(2**-17), 0]).bfloat16()

    def loaded(stored: Codes) -> CpuLinear:
        operator = CpuLinear.build(linear(40, 256), CpuLinearConfig(device="cpu", weights="q8_0"))
        operator.allocate()
        operator.load_stored("weight", stored, None, None)
        return operator

    stored = Codes(codes, scales, bits=8)
    assert scales[:, 2].abs().min() < 2**-17 < scales[:, 1].min(), "some lose a bit"
    exact = Codes(codes, torch.where(scales.abs() < 2**-17, scales.sign() * 2**-17, scales), bits=8)
    assert loaded(exact).unpack("weight").equal(exact.values())
    error = (loaded(stored).unpack("weight") - stored.values()).abs()
    assert 0 < error.max() <= 128 * 2**-25 and not error[:, :128].any()
    for wrong, words in (
        (Codes(codes, scales * 1e6, bits=8), r"a scale is 1\.\d+e\+06; q8_0's are fp16, up to 65504"),
        (Codes(codes, scales, torch.zeros(40, 4, dtype=torch.uint8), bits=8), "it has zero points"),
        (Codes(codes, scales, group_of=torch.zeros(256, dtype=torch.int64), bits=8), "g_idx puts the inputs"),
    ):
        with pytest.raises(OperatorError, match=words):
            loaded(wrong)


def test_codes_that_do_not_fit_are_refused() -> None:
    fp8 = torch.zeros(200, 256).to(torch.float8_e4m3fn)
    grid, at = torch.ones(2, 2), (torch.tensor(3), torch.tensor(1))

    def load(weights: str, stored: Any, **arguments: Any) -> None:
        operator = CpuLinear.build(
            linear(200, 256), CpuLinearConfig(device="cpu", weights=weights, **arguments)
        )
        operator.allocate()
        try:
            operator.load_stored("weight", stored, None, None)
        finally:
            assert not operator.native.has_weight

    with pytest.raises(OperatorError, match=r"blocks of 64 × 128; weights: fp8 keeps 128 × 128"):
        load("fp8", Fp8Blocks(fp8, torch.ones(4, 2), (64, 128)))
    with pytest.raises(OperatorError, match=r"found shape \[200, 128\]; expected \[200, 256\]"):
        load("fp8", Fp8Blocks(fp8[:, :128], grid[:, :1], (128, 128)))
    with pytest.raises(OperatorError, match=r"found scales \[2, 1\]; expected \[2, 2\]"):
        load("fp8", Fp8Blocks(fp8, grid[:, :1], (128, 128)))
    with pytest.raises(OperatorError, match=r"the scale of block \[0, 0\] is 0\.0"):
        load("fp8", Fp8Blocks(fp8, 0 * grid, (128, 128)))
    with pytest.raises(OperatorError, match=r"found scales \[200, 4\]; expected \[200, 8\]"):
        load("mxfp8", Fp8Blocks(fp8, torch.ones(200, 4), (1, 32)))
    for scale in (0.75, 0.0, -1.0, math.inf):
        with pytest.raises(OperatorError, match=r"block \[3, 1\] is .*; allowed: powers of two"):
            load("mxfp8", Fp8Blocks(fp8, torch.ones(200, 8).index_put(at, torch.tensor(scale)), (1, 32)))
    with pytest.raises(OperatorError, match="fp8 codes for nvfp4 weights"):
        load("nvfp4", Fp8Blocks(fp8, grid, (128, 128)))
    codes, scales = torch.zeros(200, 128, dtype=torch.uint8), torch.ones(200, 16).to(torch.float8_e4m3fn)
    with pytest.raises(OperatorError, match=r"the scale of all is 0\.0"):
        load("nvfp4", Nvfp4(codes, scales, torch.tensor(0.0)))
    with pytest.raises(OperatorError, match="found 15 groups for 256 inputs"):
        load("nvfp4", Nvfp4(codes, scales[:, :15], torch.tensor(1.0)))
    whole = torch.zeros(200, 256, dtype=torch.uint8)
    with pytest.raises(OperatorError, match="found 4 groups; expected 2"):
        load("int4", Codes(whole, torch.ones(200, 4)))
    with pytest.raises(OperatorError, match="found zero points; these weights have none"):
        load("int4", Codes(whole, torch.ones(200, 2), torch.ones(200, 2, dtype=torch.uint8)))
    with pytest.raises(OperatorError, match="g_idx puts the inputs of a group apart"):
        load("int4", Codes(whole, torch.ones(200, 2), None, torch.arange(256) // 128))
    with pytest.raises(OperatorError, match="integers for bf16 weights; decode them first"):
        load("bf16", Codes(whole, torch.ones(200, 1), bits=8))


@pytest.mark.parametrize("kernel", [row["name"] for row in KERNELS if row["weights"] == "mxfp8"])
def test_every_code_of_mxfp8_and_the_scales_that_bf16_has_room_for(kernel: str) -> None:
    """2^-117 to 2^119 are exact; beyond, groups of zeros alone are taken."""
    every = torch.arange(256).remainder(127).to(torch.uint8)
    codes = torch.stack([every, every | 128]).view(torch.float8_e4m3fn)
    x = torch.eye(256)

    def loaded(exponent: int, codes: torch.Tensor = codes) -> CpuLinear:
        config = CpuLinearConfig(device="cpu", weights="mxfp8", kernel=kernel)
        operator = CpuLinear.build(linear(2, 256), config)
        operator.allocate()
        scales = torch.ones(2, 8)
        scales[1, 5] = 2.0**exponent
        operator.load_stored("weight", Fp8Blocks(codes, scales, (1, 32)), None, None)
        return operator

    for exponent in (-117, -20, 0, 119):
        want, operator = codes.float(), loaded(exponent)
        want[1, 160:192] *= 2.0**exponent
        assert want.bfloat16().float().equal(want) and operator.unpack("weight").equal(want)
        assert operator(x).equal(want.T) and operator(x[163:164]).equal(want[:, 163:164].T)
    for exponent in (-127, -118, 120, 127):
        with pytest.raises(OperatorError, match=rf"row 1, group 5 is 2\^{exponent}; .* Choose weights: bf16"):
            loaded(exponent)
        zeros = codes.float()
        zeros[1, 160:192] = torch.tensor([0.0, -0.0]).repeat(16)
        operator = loaded(exponent, zeros.to(torch.float8_e4m3fn))
        assert operator.unpack("weight").equal(zeros) and operator(x).equal(zeros.T)


def test_a_kernel_that_is_named_decides_about_the_format() -> None:
    form = Format("fp8_channel", block=(1, 64), encoding="fp8_channel")
    kept = CpuLinearConfig(device="cpu", weights="kept", kernel="reference_bf16")
    assert CpuLinear.use_checkpoint_format(kept, form) == kept
    named = replace(kept, kernel="reference_fp8_channel")
    assert CpuLinear.use_checkpoint_format(named, form).weights == "fp8_channel"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(dtype: torch.dtype) -> None:
    layer = linear(40, 96)
    operator = swapped(layer)
    x = torch.randn(2, 3, 5, 96).to(dtype)
    y = operator(x)
    assert y.shape == (2, 3, 5, 40) and y.dtype == dtype
    assert relative_error(y, layer.double()(x.double())) <= 2 * TOLERANCE["bf16"]
    assert torch.equal(operator(x.transpose(0, 2)), y.transpose(0, 2))
    assert operator(x[0, 0, 0]).shape == (40,)
    assert relative_error(operator(x[0, 0, 0]), y[0, 0, 0]) <= TOLERANCE["bf16"]
    assert operator(x[:0]).shape == (0, 3, 5, 40)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_result_depends_on_neither_threads_nor_neighbours(weights: str) -> None:
    operator = swapped(linear(2048, 512), weights=weights)
    x = torch.randn(700, 512)
    want = operator(x)
    try:
        for threads in (1, 3, 8):
            _native.set_threads(threads)
            assert torch.equal(operator(x), want)
    finally:
        _native.set_threads(0)
    # 16 rows and more take the same kernel, whichever that is.
    assert torch.equal(operator(x[300:340]), want[300:340])


def test_it_is_an_nn_linear() -> None:
    operator = swapped(linear(24, 56, bias=True), weights="int8")
    assert isinstance(operator, nn.Linear)
    assert (operator.in_features, operator.out_features) == (56, 24)
    assert operator.weight.shape == (24, 56) and operator.weight.dtype == torch.float32
    assert not list(operator.parameters()) and not list(operator.buffers())
    assert "56 → 24, bias, int8" in repr(operator)


def test_gradients_are_those_of_the_unpacked_weight() -> None:
    operator = swapped(linear(24, 56, bias=True), weights="int4", group_size=32)
    x = torch.randn(3, 4, 56, requires_grad=True)
    operator(x).square().sum().backward()
    y = operator(x).detach()
    assert relative_error(x.grad, 2 * y @ operator.weight) <= 1e-5
    operator(x).sum().backward()  # a second graph on the same layer


def test_custom_op() -> None:
    operator = swapped(linear(24, 56))
    x = torch.randn(5, 56, requires_grad=True)
    torch.library.opcheck(torch.ops.ktinject.linear.default, (x, operator._handle))
    compiled = torch.compile(lambda x: operator(x) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), operator(x) * 2)


def test_peft() -> None:
    peft = pytest.importorskip("peft")
    # PEFT looks for a parameter to learn the model's device and dtype.
    model = nn.Sequential(swapped(linear(24, 56), weights="int8"), nn.Tanh(), linear(8, 24))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    x = torch.randn(3, 56)
    lora = adapted.base_model.model[0]
    update = lora.get_delta_weight("default")
    want = model[2](torch.tanh(lora.base_layer(x) + x @ update.T))
    assert relative_error(adapted(x), want) <= 1e-5
    adapted(x).sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)


ALL = [
    {"name": "linears", "match": {"class": "Linear"}, "replace": {"operator": "cpu_linear"}},
    {"name": "experts", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}},
]


def rules(**arguments: Any) -> list[dict[str, Any]]:
    return [{**rule, "replace": {**rule["replace"], **arguments}} for rule in ALL]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_a_model_with_all_linears_swapped(name: str) -> None:
    model = tiny(name)
    other = ktinject.optimize(tiny(name), rules(), progress=False)
    assert isinstance(other.lm_head, CpuLinear)
    ids = torch.randint(3, 96, (2, 11))
    with torch.inference_mode():
        assert relative_error(other(ids).logits, model(ids).logits) <= 0.03
    assert other.generate(ids, max_new_tokens=3).shape[0] == 2


def test_saved_again_as_it_was(tmp_path: Path) -> None:
    model = tiny("qwen3_moe").bfloat16()
    other = ktinject.optimize(copy.deepcopy(model), rules(), progress=False)
    other.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    packed = tmp_path / "packed"
    lossy = ktinject.optimize(model, rules(weights="int8"), progress=False)
    lossy.save_pretrained(packed)
    heads: list[Any] = [made.lm_head for made in (lossy, ktinject.load(packed, progress=False))]
    found = [torch.zeros(head.out_features, head.in_features) for head in heads]
    for head, weight in zip(heads, found):
        head.native.unpack(weight)
    assert torch.equal(*found) and found[0].any()


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def trained(request: pytest.FixtureRequest) -> tuple[Path, Any, Tensor]:
    """A trained model's folder, the model in fp32, and some text that it has not seen."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained_model(request.param)
    text = trained_model("heldout.txt").read_text("utf-8")[:4096]
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:512])
    assert len(ids) == 512
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids


@pytest.mark.parametrize("weights,limit", [("bf16", 1e-3), ("int8", 5e-3), ("int4", 0.055)])
def test_trained_models_on_the_cpu_alone(
    trained: tuple[Path, Any, Tensor], weights: str, limit: float
) -> None:
    """Mean KL divergence, in nats, of the model with every linear and expert swapped from the one in fp32.

    int4's is 0.0497 with AVX-512 and 0.0501 with AMX, which sum in another order; the limit leaves room for other CPUs.
    """
    folder, exact, ids = trained
    found = ktinject.load(
        folder,
        rules(weights=weights, group_size=32),
        dtype=torch.float32,
        devices=["cpu"],
        progress=False,
    )
    assert evaluate.divergence(exact, found, ids).mean_nats <= limit


def refuses(match: str, call: Any, *arguments: Any) -> None:
    with pytest.raises(OperatorError, match=match):
        call(*arguments)


def test_refused_modules() -> None:
    machine = detect()
    config = CpuLinearConfig(device="cpu")

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * functional.linear(x, self.weight, self.bias)

    assert CpuLinear.supports(nn.Embedding(3, 4), config, machine) == "it replaces nn.Linear"
    assert CpuLinear.supports(Other(3, 4), config, machine) == "its forward is not that of nn.Linear"
    quantised = nn.Linear(3, 4)
    quantised.weight = nn.Parameter(quantised.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert "it is quantised" in str(CpuLinear.supports(quantised, config, machine))
    with torch.device("meta"):
        wide = nn.Linear(65537, 4)
    reason = CpuLinear.supports(wide, config, machine)
    assert reason == "in_features: found 65537; allowed: 1 to 65536"
    with pytest.raises(ValueError, match="kernel is 'fast'; for weights bf16 it is auto, "):
        CpuLinearConfig(device="cpu", kernel="fast")
    refuses("a Embedding cannot be replaced", CpuLinear.build, nn.Embedding(3, 4), config)


def test_refused_loads_and_inputs() -> None:
    layer = linear(24, 56, bias=True)
    operator = CpuLinear.build(layer, CpuLinearConfig(device="cpu", weights="int8"))
    refuses("weight: allocate\\(\\) was not called", operator.load, "weight", layer.weight, None, None)
    refuses("forward before allocate|expected", operator, torch.randn(1, 56))
    operator.allocate()
    refuses("never loaded: weight, bias", operator.finish)
    refuses("never loaded", operator.unpack, "weight")
    refuses("found parameter gain; allowed: weight, bias", operator.load, "gain", layer.weight, None, None)
    refuses(
        r"found shape \[56, 24\].*expected the whole \[24, 56\]",
        operator.load,
        "weight",
        layer.weight.T,
        None,
        None,
    )
    refuses("found dtype int8", operator.load, "weight", torch.zeros(24, 56, dtype=torch.int8), None, None)
    broken = layer.weight.clone()
    broken[3, 7] = float("nan")
    refuses("weight: output row 3 holds a NaN or an infinity", operator.load, "weight", broken, None, None)
    operator.load("weight", layer.weight, None, None)
    refuses("never loaded: bias", operator.finish)
    operator.load("bias", layer.bias, None, None)
    operator.finish()
    refuses(r"found input \[2, 55\]; expected \[\.\.\., 56\]", operator, torch.randn(2, 55))


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "mxfp4", "nvfp4", "fp8_channel", "mxfp8"])
def test_a_refused_write_leaves_the_layer_as_it_was(weights: str) -> None:
    """What PEFT's merge of an adapter that diverged does. Outputs before the NaN could be packed."""
    layer = linear(200, 64, bias=True)
    operator = swapped(layer, weights=weights, group_size=32)
    x = torch.randn(3, 64)
    want, kept = operator(x), operator.unpack("weight")
    broken = torch.randn(200, 64)
    broken[190, 7] = float("nan")
    with pytest.raises(OperatorError, match="weight: output row 190 holds a NaN"):
        operator.weight.data = broken
    with pytest.raises(OperatorError, match="weight: output row 190 holds a NaN"):
        operator.weight.add_(broken)
    assert torch.equal(operator(x), want)
    assert torch.equal(operator.unpack("weight"), kept)
    operator.finish()
    operator.weight.data = layer.weight
    assert torch.equal(operator(x), want)
    operator.weight.data = torch.randn(200, 64)
    assert not torch.equal(operator(x), want)


def test_a_refused_write_is_no_loss() -> None:
    operator = swapped(linear(8, 64).bfloat16())
    assert operator.is_lossless()
    with pytest.raises(OperatorError, match="shape"):
        operator.write("weight", torch.randn(8, 63))
    assert operator.is_lossless()


def test_a_layer_without_weights_computes_nothing() -> None:
    layer = linear(24, 64, bias=True)
    operator = CpuLinear.build(layer, CpuLinearConfig(device="cpu", weights="int8"))
    operator.allocate()
    refuses("forward: never loaded: weight", operator, torch.randn(1, 64))
    broken = layer.weight.clone()
    broken[20, 3] = float("inf")
    refuses("output row 20 holds", operator.load, "weight", broken, None, None)
    refuses("forward: never loaded: weight", operator, torch.randn(1, 64))
    operator.load("weight", layer.weight, None, None)
    refuses("forward: never loaded: bias", operator, torch.randn(1, 64))


def test_refused_rules() -> None:
    bad = [{"name": "norm", "match": {"path": r".*\.norm"}, "replace": {"operator": "cpu_linear"}}]
    with pytest.raises(PlanError, match=r"cannot replace a Qwen3MoeRMSNorm: it replaces nn\.Linear"):
        ktinject.plan(tiny("qwen3_moe"), bad)


def test_a_head_tied_to_the_embedding_gets_weights_of_its_own() -> None:
    head = [{"name": "head", "match": {"path": "lm_head"}, "replace": {"operator": "cpu_linear"}}]
    model, other = (tiny("qwen3_moe", tie_word_embeddings=True) for _ in range(2))
    ktinject.optimize(other, head, progress=False)
    assert isinstance(other.lm_head, CpuLinear) and isinstance(other.model.embed_tokens.weight, nn.Parameter)
    other.tie_weights()
    assert not list(other.lm_head.parameters())
    ids = torch.randint(3, 96, (2, 5))
    with torch.inference_mode():
        assert relative_error(other(ids).logits, model(ids).logits) <= 2 * TOLERANCE["bf16"]


WRITES: dict[str, Any] = {
    "add": lambda weight, other: weight.add_(other),
    "plus": lambda weight, other: operator_module.iadd(weight, other),
    "data plus": lambda weight, other: operator_module.iadd(weight.data, other),
    "copy": lambda weight, other: weight.copy_(weight + other),
    "data": lambda weight, other: setattr(weight, "data", weight + other),
    "rows": lambda weight, other: weight[:].add_(other),
    "item": lambda weight, other: weight.__setitem__(slice(None), weight + other),
    "out": lambda weight, other: torch.add(weight, other, out=weight),
    "view": lambda weight, other: weight.data.view(-1).add_(other.view(-1)),
    "detached": lambda weight, other: weight.detach().add_(other),
}


class TestWritten:
    """What is written to `.weight` counts, as in nn.Linear."""

    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
    @pytest.mark.parametrize("inference", [False, True])
    def test_in_every_way(self, write: Any, inference: bool) -> None:
        source = linear(24, 56, bias=True).bfloat16()
        operator, other, x = swapped(source), torch.randn(24, 56).bfloat16(), torch.randn(3, 56)
        with torch.inference_mode(inference), torch.no_grad():
            write(operator.weight, other)
            write(operator.bias, other[:, 0].contiguous())
            source.weight += other
            source.bias += other[:, 0]
            assert torch.equal(operator.weight, source.weight) and torch.equal(operator.bias, source.bias)
            assert relative_error(operator(x), source.float()(x)) <= 0.01
        assert type(operator.weight + 1) is Tensor and type(operator.weight.clone()) is Tensor
        assert type(copy.deepcopy(operator.weight)) is Tensor

    def test_by_initialisation(self) -> None:
        operator = swapped(linear(24, 56).bfloat16())
        nn.init.constant_(operator.weight, 0.5)
        assert (operator.weight == 0.5).all()

    def test_reading_packs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        operator = swapped(linear(24, 56))
        monkeypatch.setattr(CpuLinear, "write", lambda *_: pytest.fail("it was packed again"))
        weight = operator.weight
        assert (weight @ weight.T).shape == (24, 24) and weight.float().sum().isfinite()
        assert weight[0].max() <= weight.abs().max() and weight.requires_grad_(False) is weight

    def test_another_shape_is_refused(self) -> None:
        operator = swapped(linear(24, 56))
        with pytest.raises(
            OperatorError, match=r"weight: found shape \[56, 24\]; expected \[24, 56\].*replace: keep"
        ):
            operator.weight.data = torch.zeros(56, 24)

    @pytest.mark.parametrize("safe", [False, True])
    @pytest.mark.parametrize("weights, error", [("bf16", 0.01), ("int8", 0.03)])
    def test_adapters_are_merged(self, weights: str, error: float, safe: bool) -> None:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False, lora_bias=True)
        model = nn.Sequential(swapped(linear(24, 56, bias=True), weights=weights), nn.Tanh(), linear(8, 24))
        before = model[0].weight.clone()
        adapted = peft.get_peft_model(model, config)
        x = torch.randn(9, 56)
        with torch.no_grad():
            want = adapted(x)
            adapted.merge_adapter(safe_merge=safe)
            assert relative_error(adapted(x), want) <= error
            adapted.unmerge_adapter()
            assert relative_error(adapted.base_model.model[0].base_layer.weight, before) <= error
            merged = adapted.merge_and_unload(safe_merge=safe)
            assert isinstance(merged[0], CpuLinear)
            assert relative_error(merged(x), want) <= error
