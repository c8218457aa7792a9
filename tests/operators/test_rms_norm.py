"""`rms_norm` against the modules it replaces: bit by bit in PyTorch's operations, within a rounding as one kernel."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from torch import nn

import ktinject
from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.probes.norm import RmsNormSpec, formula, probe
from ktinject.operators.rms_norm import RmsNorm, RmsNormConfig
from ktinject.support import Support

FAMILIES = ["deepseek_v3", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_next"]


def norms(family: str) -> list[nn.Module]:
    return [module for module in models.tiny(family).modules() if type(module).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_cpu_it_is_the_module_s_own(family: str, dtype: torch.dtype) -> None:
    found = norms(family)
    assert len(found) >= 5
    for module in found:
        module = module.to(dtype)
        with torch.no_grad():
            module.weight.normal_()
        operator = RmsNorm.build(module, RmsNormConfig(device="cpu"))
        assert operator.weight is module.weight
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        assert operator.epsilon == pytest.approx(epsilon, rel=1e-5)
        x = torch.randn(2, 3, module.weight.shape[0]).to(dtype)
        with torch.no_grad():
            assert_close(operator(x), module(x))
        assert torch.equal(operator(x), module(x)), "with gradients it is torch's operations"


def assert_close(out: torch.Tensor, want: torch.Tensor) -> None:
    assert out.shape == want.shape and out.dtype == want.dtype
    # The order of the sum may move a value across a rounding boundary, in both roundings.
    step = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[out.dtype]
    assert ((out - want).abs() <= 2 * step * want.abs() + 1e-30).all()
    if out.numel():
        assert (out != want).float().mean() <= (1.0 if out.dtype == torch.float32 else 0.02)


SIZES = [(1, 128), (1, 2048), (5, 7168), (3, 20000), (700, 128), (40, 33), (2, 1), (0, 64)]


def inputs(rows: int, n: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """In one piece, and not."""
    return [
        torch.randn(rows, n, device=device).to(dtype),
        torch.randn(2, rows, n + 1, device=device).to(dtype)[..., 1:],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,n", SIZES)
def test_on_the_cpu(rows: int, n: int, dtype: torch.dtype) -> None:
    module = norms("qwen3_moe")[0]
    module.weight = nn.Parameter(torch.randn(n).to(dtype))
    operator = RmsNorm.build(module, RmsNormConfig(device="cpu"))
    for x in inputs(rows, n, dtype, "cpu"):
        with torch.no_grad():
            assert_close(operator(x), formula(x, operator.weight, operator.epsilon))


def test_the_native_norm_refuses_what_does_not_fit() -> None:
    x, weight = torch.zeros(3, 8), torch.ones(8)
    for changed in (
        {"weight": torch.ones(7)},
        {"weight": weight.bfloat16()},
        {"out": torch.zeros(2, 8)},
        {"out": torch.zeros(3, 8).half()},
        {"x": torch.zeros(3, 0), "weight": torch.ones(0), "out": torch.zeros(3, 0)},
    ):
        with pytest.raises(ValueError, match="norm: expected x and out"):
            _native.norm_rows(
                **{"x": x, "weight": weight, "epsilon": 1e-6, "out": torch.zeros(3, 8)} | changed
            )


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return formula(x, 1 + self.weight, 1e-6)


class InBf16(Offset):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Buffered(Offset):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(64), persistent=False)


def test_a_weight_less_1_that_is_rounded_with_it_is_refused() -> None:
    assert probe(Offset()) == RmsNormSpec(64, 1e-6, has_unit_offset=True, rounds_before_weight=True)
    with pytest.raises(OperatorError, match=r"cannot be replaced: .*stored less 1, and it rounds the sum"):
        RmsNorm.build(Offset(), RmsNormConfig(device="cpu"))


class Gated(Offset):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return formula(x if gate is None else x * nn.functional.silu(gate), self.weight, 1e-6)


def test_a_norm_that_takes_a_gate_is_refused() -> None:
    assert isinstance(probe(Gated()), RmsNormSpec)
    with pytest.raises(OperatorError, match=r"cannot be replaced: its forward takes gate as well"):
        RmsNorm.build(Gated(), RmsNormConfig(device="cpu"))


def test_what_computes_something_else_is_refused() -> None:
    layer_norm = nn.LayerNorm(8, elementwise_affine=True, bias=False)
    for module, match in [
        (InBf16(), "rounds bf16 at another place"),
        (Buffered(), "a buffer beside its weight"),
        (layer_norm, "it"),
        (nn.LayerNorm(8), "something else than one vector"),
        (nn.Linear(8, 8, bias=False), "something else than one vector"),
    ]:
        found = probe(module)
        assert isinstance(found, Support) and match in found.reason
        with pytest.raises(OperatorError, match="cannot be replaced"):
            RmsNorm.build(module, RmsNormConfig(device="cpu"))


RULES = [
    {"name": "norms", "match": {"path": r".*norm"}, "replace": {"operator": "rms_norm"}},
    {"name": "e", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}},
]


def replaced(model: nn.Module) -> int:
    return len([module for module in model.modules() if isinstance(module, RmsNorm)])


def test_a_model_with_all_norms_replaced_says_the_same(tiny_qwen3_moe: Path) -> None:
    model = ktinject.load(tiny_qwen3_moe, RULES, devices=["cpu"], progress=False)
    plain = ktinject.load(tiny_qwen3_moe, RULES[1:], devices=["cpu"], progress=False)
    assert replaced(model) == 3 * 4 + 1 and replaced(plain) == 0
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits), "with gradients it is torch's operations"
    with torch.inference_mode():
        want = plain(ids).logits
        assert (model(ids).logits - want).abs().max() <= 1e-3 * want.abs().max()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_bundled_rules_replace_them_on_the_cpu(family: str) -> None:
    model = ktinject.optimize(models.tiny(family), "auto", devices=["cpu"], progress=False)
    assert replaced(model) == len(norms(family))


@pytest.mark.gpu
def test_the_bundled_rules_replace_them_on_a_gpu(tiny_qwen3_moe: Path) -> None:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    on_cpu = {"gpu_experts": 0}  # as theirs are
    model = ktinject.load(tiny_qwen3_moe, "qwen3-moe", variables=on_cpu, progress=False)
    plain = ktinject.load(tiny_qwen3_moe, RULES[1:], progress=False)
    assert replaced(model) == 3 * 4 + 1
    ids = torch.arange(20, device=model.device)[None]
    with torch.inference_mode():
        difference = (model(ids).logits - plain(ids).logits).abs().max()
    assert difference <= 1e-3 * plain(ids).logits.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,n", SIZES)
def test_on_the_gpu(rows: int, n: int, dtype: torch.dtype, family: str) -> None:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    module = norms(family)[0]
    module.weight = nn.Parameter(torch.randn(n, device="cuda").to(dtype))
    operator = RmsNorm.build(module.cpu(), RmsNormConfig(device="cuda:0")).cuda()
    for x in inputs(rows, n, dtype, "cuda"):
        with torch.no_grad():
            assert_close(operator(x), operator._in_torch(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,n", SIZES)
def test_a_weight_of_fp32_on_the_gpu(rows: int, n: int, dtype: torch.dtype) -> None:
    """As DeepSeek-V4 has it: of a norm that rounds once, at its end."""
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    module = norms("gpt_oss")[0]
    module.weight = nn.Parameter(torch.randn(n))
    operator = RmsNorm.build(module, RmsNormConfig(device="cuda:0")).cuda()
    assert operator.weight.dtype == torch.float32 and not operator.spec.rounds_before_weight
    for x in inputs(rows, n, dtype, "cuda"):
        with torch.no_grad():
            assert_close(operator(x), operator._in_torch(x))


@pytest.mark.gpu
def test_a_launch_goes_to_the_device_of_its_stream_whichever_is_current() -> None:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    last = torch.cuda.device_count() - 1  # with several, not the current one
    x, weight = (torch.randn(3, 64, device=f"cuda:{last}") for _ in range(2))
    with torch.cuda.device(0):
        operator = RmsNorm.build(norms("qwen3_moe")[0], RmsNormConfig(device=f"cuda:{last}"))
        operator.weight = nn.Parameter(weight[0].clone(), False)
        with torch.no_grad():
            out, want = operator(x), formula(x, operator.weight, operator.epsilon)
        assert torch.cuda.current_device() == 0
    assert out.device == x.device and (out - want).abs().max() <= 1e-5
    addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    with pytest.raises(RuntimeError, match="choosing a device"):
        _native.rms_norm(*addresses, 0, 3, 64, 1e-6, (last + 1, 0))
