"""Addresses that native code is given: of tensors that are what it takes them for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_cases import EXPERTS, HIDDEN, inputs, way
from torch import Tensor

import ktinject
from ktinject import operators
from ktinject.addresses import address
from ktinject.errors import OperatorError
from ktinject.generation.cuda import chooser, decode_ops, delta_ops, recurrent_ops
from ktinject.generation.cuda.chooser import Chooser
from ktinject.generation.cuda.decode_ops import Cache, Norm
from ktinject.generation.cuda.delta_ops import Projected, States, Weights
from ktinject.generation.cuda.recurrent_ops import Mamba2Weights
from ktinject.operators.offload import submits

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_no_other_file_hands_out_an_address() -> None:
    package = Path(ktinject.__file__).parent
    files = [*package.rglob("*.py"), *Path(operators.__file__).parent.rglob("*.py")]
    found = {
        f"{file.name}: {line.strip()}"
        for file in files
        for line in file.read_text().splitlines()
        # To compare one, or to look at how it is aligned, is not to hand it out.
        if re.search(r"\.data_ptr\(\)(?! %| ==|:)", line) and file.name not in ("addresses.py", "watch.py")
    }
    assert len(files) > 50 and not found


def test_a_tensor_that_fits_has_its_address() -> None:
    tensor = torch.zeros(2, 3, 4)
    assert address("x", None, CPU) == 0
    assert address("x", tensor, CPU) == tensor.data_ptr()
    assert address("x", tensor, CPU, torch.float32, (2, 3, 4)) == tensor.data_ptr()
    for strided, view in (
        (1, tensor[:, 1:]),
        (2, tensor[:, :, 1:]),
        (1, tensor[:, 1:2, 1:]),
        (1, tensor[:0]),
    ):
        assert address("x", view, CPU, strided=strided) == view.data_ptr()


@pytest.mark.parametrize(
    "tensor, wanted",
    [
        (torch.zeros(2, 3), {"dtype": BF16}),
        (torch.zeros(2, 3), {"shape": (3, 2)}),
        (torch.zeros(2, 3), {"shape": (2, 3, 1)}),
        (torch.zeros(2, 3, device="meta"), {}),
        (torch.zeros(2, 3).T, {}),
        (torch.zeros(2, 3)[:, ::2], {}),
        (torch.zeros(2, 3)[:, ::2], {"strided": 1}),
        (torch.zeros(2, 3, 4)[:, :, 1:], {"strided": 1}),
        (torch.zeros(1, 3).expand(2, 3), {}),
    ],
)
def test_what_does_not_fit_is_refused(tensor: Tensor, wanted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^scores: found \[.*; expected .* on cpu$"):
        address("scores", tensor, CPU, **wanted)


def of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(
    q_norm: Tensor, k_norm: Tensor, cos: Tensor, sin: Tensor, block_counts: Tensor, **others: Tensor
) -> None:
    q, k, v = (others.pop(name) for name in "qkv")
    norms = Norm(q_norm, 1e-6), Norm(k_norm, 1e-6)
    decode_ops.attend(q, k, v, norms, (cos, sin), Cache(**others), 1.0, block_counts)


def latent(q: Tensor, kv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, **cache: Tensor) -> None:
    decode_ops.latent(q, kv, Norm(norm, 1e-6), (cos, sin), Cache(**cache, mask=of(1)), False)


def linear(x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, normed: Tensor, residual: Tensor) -> None:
    decode_ops.linear(x, [weight], [bias], norm=Norm(norm, 1e-6), normed=normed, residual=residual)


def choose(scores: Tensor, noise: Tensor, **state: Tensor) -> None:
    Chooser(**state, pad=None)(scores, noise)


def route_grouped(logits: Tensor, bias: Tensor) -> None:
    decode_ops.route_grouped(logits, bias, 2, 1, 1, True, 1.0)


def rms_norm(x: Tensor, weight: Tensor) -> None:
    decode_ops.rms_norm(x, Norm(weight, 1e-6))


def rotation(positions: Tensor, frequencies: Tensor) -> None:
    decode_ops.rotation(positions, frequencies, 1.0, BF16)


def gated_delta(  # of two heads of keys, each with three of values
    q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor, block_counts: Tensor, **others: Tensor
) -> None:
    norm, states = Norm(others.pop("norm"), 1e-6), States(others.pop("inputs"), others.pop("states"))
    delta_ops.gated_delta(Projected(q, k, v, z, b, a), Weights(**others, norm=norm), states, block_counts)


def mamba2(projected: Tensor, block_counts: Tensor, inputs: Tensor, states: Tensor, **others: Tensor) -> None:
    weights = Mamba2Weights(**others | {"norm": Norm(others["norm"], 1e-6)})  # type: ignore[arg-type]
    recurrent_ops.mamba2(projected, weights, States(inputs, states), 2, block_counts)


def short_convolution(projected: Tensor, taps: Tensor, bias: Tensor, inputs: Tensor) -> None:
    recurrent_ops.short_convolution(projected, taps, bias, inputs)


INT64, FP32 = torch.int64, torch.float32
# What each takes, of two rows.
RIGHT: dict[Callable[..., None], dict[str, Tensor]] = {
    attend: {
        "q": of(2, 4, 8),
        "k": of(2, 2, 8),
        "v": of(2, 2, 8),
        "q_norm": of(8),
        "k_norm": of(8),
        "cos": of(2, 1, 8),
        "sin": of(2, 1, 8),
        "keys": of(2, 2, 16, 8),
        "values": of(2, 2, 16, 8),
        "cache_position": of(1, dtype=INT64),
        "mask": of(2, 1, 1, 16, dtype=torch.bool),
        "block_counts": of(8, dtype=torch.int32),
    },
    latent: {
        "q": of(2, 4, 24),
        "kv": of(2, 40),
        "norm": of(32),
        "cos": of(2, 1, 8),
        "sin": of(2, 1, 8),
        "keys": of(2, 1, 16, 32),
        "values": of(2, 1, 16, 8),
        "cache_position": of(1, dtype=INT64),
    },
    linear: {
        "x": of(2, 32),
        "weight": of(8, 32),
        "bias": of(8),
        "norm": of(32),
        "normed": of(2, 32),
        "residual": of(2, 8),
    },
    choose: {
        "ids": of(2, 1, dtype=INT64),
        "result": of(2, 2, dtype=INT64),
        "length": of(1, dtype=INT64),
        "seen": of(2, 10, dtype=torch.bool),
        "ends": of(9, dtype=torch.bool),
        "scores": of(2, 9, dtype=FP32),
        "noise": of(2, 9, dtype=FP32),
    },
    route_grouped: {"logits": of(2, 32, dtype=FP32), "bias": of(32)},
    gated_delta: {
        "q": of(2, 2, 32),
        "k": of(2, 2, 32),
        "v": of(2, 2, 192),
        "z": of(2, 2, 192),
        "b": of(2, 2, 3),
        "a": of(2, 2, 3),
        "block_counts": of(4, dtype=torch.int32),
        "taps": of(512, 1, 4),
        "a_log": of(6),
        "dt_bias": of(6, dtype=FP32),
        "norm": of(64),
        "inputs": of(2, 512, 4),
        "states": of(2, 6, 32, 64, dtype=FP32),
    },
    mamba2: {
        "projected": of(2, 644),
        "block_counts": of(4, dtype=torch.int32),
        "taps": of(384, 1, 4),
        "bias": of(384),
        "a_log": of(4),
        "dt_bias": of(4, dtype=FP32),
        "d": of(4),
        "norm": of(256),
        "inputs": of(2, 384, 4),
        "states": of(2, 4, 64, 32, dtype=FP32),
    },
    short_convolution: {
        "projected": of(2, 96),
        "taps": of(32, 1, 3),
        "bias": of(32),
        "inputs": of(2, 32, 3),
    },
    rms_norm: {"x": of(2, 8), "weight": of(8)},
    rotation: {"positions": of(2, 1, dtype=INT64), "frequencies": of(4, dtype=FP32)},
}
COPIED = {(choose, "scores"), (route_grouped, "logits"), (rms_norm, "x")}  # made contiguous
LONGER = {
    (attend, "block_counts"),
    (attend, "mask"),
    (attend, "q"),
    (gated_delta, "block_counts"),
    (mamba2, "block_counts"),
    (latent, "q"),
    (route_grouped, "logits"),
    (rotation, "frequencies"),
}  # may be


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The native calls that were reached; they do nothing."""
    calls: list[str] = []

    class Stubs:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_, **__: calls.append(name) or 1  # type: ignore[func-returns-value]

    for module in (decode_ops, delta_ops, recurrent_ops, chooser):
        monkeypatch.setattr(module, "_native", Stubs())
        monkeypatch.setattr(module, "stream_of", lambda device: (0, 0))
    return calls


@pytest.mark.parametrize("call, name", [(call, name) for call, right in RIGHT.items() for name in right])
def test_the_kernels_of_a_decode_step_get_what_they_take(
    call: Callable[..., None], name: str, called: list[str]
) -> None:
    arguments = RIGHT[call]
    right = arguments[name]
    call(**arguments)
    reached = len(called)
    assert reached
    wrong = [("device", right.to("meta"))]
    if (call, name) != (route_grouped, "bias"):  # which is of any dtype
        wrong.append(("dtype", right.to(torch.float16 if right.dtype.is_floating_point else torch.int16)))
    if (call, name) not in LONGER:
        wrong.append(("size", right.repeat_interleave(2, -1)))
    apart = torch.stack([right, right], -1)[..., 0]
    if (call, name) not in COPIED and not apart.is_contiguous():
        wrong.append(("strides", apart))
    accepted = []
    for why, tensor in wrong:
        try:
            call(**arguments | {name: tensor})
        except ValueError:
            continue
        accepted.append(why)
    assert not accepted and len(called) == reached


@pytest.mark.gpu
def test_what_a_submit_and_a_wait_are_given_on_a_gpu_is_checked() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    here, (x, ids, weights) = way(), inputs(2, device="cuda:0")
    narrow = torch.zeros(2, 2, dtype=INT64, device="cuda:0")
    places = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda:0")
    logits = torch.zeros(2, EXPERTS, device="cuda:0")
    for on_gpu in (
        submits.OnGpu(places.long(), narrow.int()),
        submits.OnGpu(places, narrow),
        submits.OnGpu(places, narrow.int()[:1]),
        submits.OnGpu(places.cpu(), narrow.int()),
    ):
        with pytest.raises(OperatorError, match=r"handoff: (places|chosen): found"):
            here.submit(x, ids, weights, on_gpu)
    for wrong in (logits.double(), logits.cpu(), logits[:1], logits[:, 1:], logits.repeat(1, 2)[:, ::2]):
        with pytest.raises(OperatorError, match="handoff: logits: found"):
            here.submit(x, ids, weights, routing=submits.Routing(wrong, True))
    with pytest.raises(
        OperatorError, match=r"handoff: logits: found torch.float32 beside weights of torch.bfloat16"
    ):
        here.submit(x, ids, weights.bfloat16(), routing=submits.Routing(logits, True))
    apart = torch.stack([ids, ids], -1)[..., 0]  # it would be written, and the result lost
    with pytest.raises(OperatorError, match="handoff: top_k_index: found"):
        here.submit(x, apart, weights, routing=submits.Routing(logits, True))
    ticket = here.submit(x, ids, weights)
    good = torch.zeros(2, HIDDEN, device="cuda:0")
    for addend, residual in ((good.bfloat16(), None), (good[:1], None), (None, good), (None, x.cpu())):
        with pytest.raises(OperatorError, match=r"handoff: (addend|residual): found"):
            here.wait(ticket, None, addend, residual)
    assert torch.isfinite(here.wait(ticket, None, good, torch.zeros_like(x))).all()
