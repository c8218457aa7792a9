"""Arrays that bindings take: used as they are, or refused; never a converted copy, to which results would be lost.

The list of bindings is what the module exports, so that a new one that takes an array fails here until it has a case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from attention import grouped
from silu_layers import silu_experts
from torch import Tensor

from ktinject import _native

# (function, arguments) of a call that is right
Case = Callable[[], tuple[Callable[..., Any], dict[str, Any]]]


class Wanted(NamedTuple):
    """An array argument, as its binding's signature says."""

    binding: str
    argument: str
    dtype: torch.dtype | None
    contiguous: bool
    written: bool
    is_list: bool

    def __str__(self) -> str:
        return f"{self.binding}-{self.argument}"


def exported() -> Iterator[tuple[str, Any]]:
    for name, value in vars(_native).items():
        members = vars(value).items() if isinstance(value, type) else ()
        yield from ((f"{name}.{inner}", member) for inner, member in members)
        yield name, value


def arrays() -> Iterator[Wanted]:
    for binding, function in exported():
        for signature, *_ in getattr(function, "__nb_signature__", ()):
            found = re.findall(r"(\w+): (collections\.abc\.Sequence\[)?torch\.Tensor\[([^]]*)\]", signature)
            assert len(found) == len(re.findall(r"Tensor|ndarray|NDArray|ArrayLike", signature)), binding
            for argument, is_list, spec in found:
                assert "device='cpu'" in spec, f"{binding}: {argument} may be anywhere"
                dtype = re.search(r"dtype=(\w+)", spec)
                yield Wanted(
                    binding=binding,
                    argument=argument,
                    dtype=getattr(torch, dtype[1]) if dtype else None,
                    contiguous="order='C'" in spec,
                    written="writable=False" not in spec,
                    is_list=bool(is_list),
                )


ARRAYS = [*arrays()]


def empty(weights: str, group_size: int = 0, symmetric: bool = True) -> Any:
    made = silu_experts(2, 256, 256, weights, group_size, symmetric=symmetric)
    made.allocate()
    return made


def experts(weights: str = "bf16", hidden: int = 64) -> Any:
    made = silu_experts(2, hidden, 32, weights, has_bias=True)
    made.allocate()
    for expert in range(2):
        for projection, shape in (("gate", (32, hidden)), ("up", (32, hidden)), ("down", (hidden, 32))):
            made.load(projection, expert, torch.randn(shape))
            made.load_bias(projection, expert, torch.randn(shape[0]))
    return made


def linear(out_features: int, in_features: int) -> Any:
    made = _native.Linear(
        out_features=out_features, in_features=in_features, weights="bf16", group_size=0, has_bias=True, kernel="auto"
    )  # fmt: skip
    made.allocate()
    made.load(torch.randn(out_features, in_features))
    made.load_bias(torch.randn(out_features))
    return made


def unfilled(weights: str, group_size: int = 0, symmetric: bool = True) -> Any:
    """A linear layer of 64 outputs and 256 inputs."""
    made = _native.Linear(
        out_features=64, in_features=256, weights=weights, group_size=group_size, symmetric=symmetric,
        has_bias=False, kernel="auto",
    )  # fmt: skip
    made.allocate()
    return made


def mixture() -> dict[str, Any]:
    return {
        "router": None,
        "weight": torch.randn(2, 64),
        "scores": "sigmoid",
        "correction": torch.zeros(2),
        "top_k": 1,
        "groups": 1,
        "top_groups": 1,
        "normed": True,
        "factor": 1.0,
        "rounds_logits": False,
        "rounds_scores": False,
        "rounds_weights": False,
        "experts": experts(),
        "shared": _native.GatedUnit(linear(32, 64), linear(32, 64), linear(64, 32)),
        "gate": torch.zeros(1, 64),
        "bias": torch.zeros(2),
        "expert_factors": torch.ones(2),
        "table": torch.zeros(5, 1, dtype=torch.int64),
    }


def with_sinks(**more: Any) -> dict[str, Any]:
    parts = linear(64, 64), linear(32, 64), linear(32, 64), linear(64, 64)
    return {**grouped(*parts, heads=4, groups=2, size=16, sinks=torch.zeros(4)), **more}


def delta() -> dict[str, Any]:
    """Two heads of keys and of values, 16 values each; a convolution over 4 tokens."""
    qkv, o = linear(3 * 32, 64), linear(64, 32)
    ba, a = (_native.Projection(linear=linear(2, 64)) for _ in range(2))
    norm = _native.Norm(torch.ones(16), 1e-6)
    return {"qkv": qkv, "ba": ba, "z": linear(32, 64), "a": a, "o": o, "norm": norm,
            "taps": torch.zeros(3 * 32, 4), "a_log": torch.zeros(2), "dt_bias": torch.zeros(2),
            "key_heads": 2, "value_heads": 2, "key_size": 16, "value_size": 16}  # fmt: skip


def decaying() -> dict[str, Any]:
    """Two heads of 16 values."""
    return {"qkv": linear(96, 64), "gate": linear(32, 64), "o": linear(64, 32), "slopes": torch.ones(2),
            "norm": _native.Norm(torch.ones(32), 1e-6), "heads": 2, "size": 16}  # fmt: skip


def convolution() -> dict[str, Any]:
    """Of 32 channels, over 3 tokens."""
    return {"in_proj": linear(3 * 32, 64), "out_proj": linear(64, 32), "taps": torch.zeros(32, 3)}


def mamba() -> dict[str, Any]:
    """Two heads of 16 values, states of 8; a convolution over 4 tokens."""
    norm = _native.Norm(torch.ones(32), 1e-6)
    vectors = {name: torch.zeros(2) for name in ("a_log", "dt_bias", "d")}
    return {"in_proj": linear(32 + 48 + 2, 64), "out_proj": linear(64, 32), "taps": torch.zeros(48, 4),
            "taps_bias": torch.zeros(48), **vectors, "has_wide_d": True, "norm": norm, "heads": 2, "groups": 1,
            "head_size": 16, "state_size": 8}  # fmt: skip


def mamba1() -> dict[str, Any]:
    """16 channels with states of 8; a convolution over 4 tokens."""
    norms = {
        f"{name}_norm": _native.Norm(torch.ones(size), 1e-6) for name, size in (("dt", 4), ("b", 8), ("c", 8))
    }
    return {"in_proj": linear(32, 64), **{name: _native.Projection(linear=linear(*sizes))
               for name, sizes in (("x_proj", (4 + 16, 16)), ("dt_proj", (16, 4)))},
            "out_proj": linear(64, 16), "taps": torch.zeros(16, 4), "taps_bias": torch.zeros(16),
            "a_log": torch.zeros(16, 8), "d": torch.zeros(16), "has_wide_d": True, **norms}  # fmt: skip


def latent() -> dict[str, Any]:
    q, kv, o = linear(4 * 24, 64), linear(32 + 8, 64), linear(64, 4 * 12)
    norm = _native.Norm(torch.ones(32), 1e-6)
    sizes = {"heads": 4, "rank": 32, "nope": 16, "rope": 8, "value": 12}
    return {"q": q, "q_a": None, "q_norm": None, "q_b": None, "kv": kv, "kv_norm": norm, "o": o, **sizes,
            "expansion": torch.randn(4 * (16 + 12), 32), "neighbours": False, "scale": 1.0,
            "sinks": torch.zeros(4), "growth": torch.ones(4), "growth_bias": torch.ones(4)}  # fmt: skip


def indexer() -> dict[str, Any]:
    projections = {
        name: _native.Projection(weight=torch.zeros(*shape))
        for name, shape in (("q", (8, 6)), ("k", (4, 8)), ("weights", (2, 8)))
    }
    sizes = {"heads": 2, "size": 4, "rotary": 2, "top_k": 3, "neighbours": False, "epsilon": 1e-6}
    return {**projections, **sizes, "norm_weight": torch.ones(4), "norm_bias": torch.zeros(4),
            "growth": torch.ones(2), "growth_bias": torch.ones(2)}  # fmt: skip


def pooled_index() -> dict[str, Any]:
    """Two heads of 4 values, pools of 3 tokens."""
    projections = {
        name: _native.Projection(weight=torch.zeros(*shape))
        for name, shape in (("q", (8, 6)), ("k", (4, 8)), ("gate", (4, 8)), ("weights", (2, 8)))
    }
    numbers = {"heads": 2, "size": 4, "top_k": 3, "epsilon": 1e-6, "score_scale": 1.0, "weight_scale": 1.0}
    tensors = {"norm_weight": torch.ones(4), "norm_bias": torch.zeros(4), "bias": torch.zeros(3, 4)}
    return {**projections, **numbers, **tensors}


def compressor() -> dict[str, Any]:
    norm = _native.Norm(torch.ones(8), 1e-6, rounds_first=False)
    projections = {name: _native.Projection(linear=linear(16, 64)) for name in ("kv", "gate")}
    return {**projections, "bias": torch.zeros(3, 16), "norm": norm, "angles": torch.ones(2), "scale": 1.0}


def shared_key() -> dict[str, Any]:
    """Four heads of 8 values."""
    linears = {
        "q_a": linear(12, 64), "q_b": linear(32, 12), "kv": linear(8, 64), "o": linear(64, 6)
    }  # fmt: skip
    norms = {
        name: _native.Norm(torch.ones(size), 1e-6, rounds_first=False)
        for name, size in (("q_norm", 12), ("kv_norm", 8))
    }
    numbers = {"heads": 4, "size": 8, "groups": 2, "window": 7, "scale": 0.3, "query_epsilon": 1e-6}
    tensors = {"grouped": torch.zeros(6, 16), "sinks": torch.zeros(4)}
    return {**linears, **norms, **tensors, **numbers, "compressor": None, "index": None}


def decoder() -> tuple[Callable[..., Any], dict[str, Any]]:
    made, norm = _native.Decoder(64, "float32"), _native.Norm(torch.ones(64), 1e-6)
    made.add(
        norm,
        _native.GroupedAttention(**with_sinks()),
        norm,
        _native.GatedUnit(linear(32, 64), linear(32, 64), linear(64, 32)),
    )
    cache = _native.DecoderCache([torch.zeros(2, 2, 8, 16)], [torch.zeros(2, 2, 8, 16)])
    tables = {"cos": torch.ones(2, 16), "sin": torch.zeros(2, 16), "mask": torch.ones(2, 8, dtype=torch.bool)}
    call = {
        "position": 3,
        "cache": cache,
        "first": 0,
        "last": 1,
        "final_norm": norm,
        "live": torch.ones(2, dtype=torch.bool),
        "positions": torch.tensor([3, 2]),
        "tokens": torch.tensor([5, 6]),
    }
    return made.forward, {"x": torch.randn(2, 64), **tables, **call, "out": torch.zeros(2, 64)}


def token_step() -> dict[str, Any]:
    """At place 3."""
    made, norm = _native.Decoder(64, "float32"), _native.Norm(torch.ones(64), 1e-6)
    unit = _native.GatedUnit(linear(32, 64), linear(32, 64), linear(64, 32))
    made.add(norm, _native.GroupedAttention(**with_sinks()), norm, unit)
    cache = _native.DecoderCache([torch.zeros(1, 2, 8, 16)], [torch.zeros(1, 2, 8, 16)])
    return {
        "decoder": made,
        "cache": cache,
        "norm": norm,
        "head": linear(9, 64),
        "embeddings": torch.randn(9, 64),
        "ids": torch.tensor([[5]]),
        "positions": torch.tensor([[3]]),
        "mask": torch.ones(8, dtype=torch.bool),
        "logits": torch.zeros(1, 9),
        "turns": True,
    }


def run_step(**arguments: Any) -> None:
    step = _native.TokenStep(**arguments)
    step.turn(torch.ones(1, 16), torch.zeros(1, 16), 3)
    assert step.run(3)


def token_choice() -> dict[str, Any]:
    """Of two rows."""
    return {
        "ids": torch.full((2, 1), -1),
        "result": torch.tensor([[-1, -1], [1, 1]]),
        "length": torch.zeros(1, dtype=torch.int64),
        "ends": torch.zeros(9, dtype=torch.bool),
        "pad": None,
    }


def choose_and_take(**arguments: Any) -> None:
    choice = _native.TokenChoice(**arguments)
    choice.choose(scores=torch.randn(2, 9), generator=None)
    choice.take()


def next_place() -> dict[str, Any]:
    """Of two rows, and a window."""
    return {
        "place": torch.tensor([3]),
        "positions": torch.tensor([[3], [2]]),
        "mask": torch.zeros(2, 1, 1, 8, dtype=torch.bool),
        "capacity": 8,
        "windows": [2],
        "places": [torch.tensor([1])],
        "rings": [torch.zeros(2, 1, 1, 2, dtype=torch.bool)],
        "prompt": 0,
    }


def generator() -> Tensor:
    return torch.Generator().manual_seed(0).get_state()


CASES: dict[str, Case] = {
    "Experts.load": lambda: (
        experts().load,
        {"projection": "up", "expert": 0, "weight": torch.randn(32, 64)},
    ),
    "Experts.load_fp8": lambda: (
        experts("fp8", 256).load_fp8,
        {
            "projection": "up",
            "expert": 0,
            "codes": torch.zeros(32, 256, dtype=torch.uint8),
            "scales": torch.ones(1, 2),
        },
    ),
    "Experts.load_nvfp4": lambda: (
        experts("nvfp4", 256).load_nvfp4,
        {
            "projection": "up",
            "expert": 0,
            "codes": torch.zeros(32, 128, dtype=torch.uint8),
            "scales": torch.zeros(32, 16, dtype=torch.uint8),
            "factor": 1.0,
        },
    ),
    "Experts.load_integers": lambda: (
        empty("int4", 128, symmetric=False).load_integers,
        {
            "projection": "up",
            "expert": 0,
            "codes": torch.ones(256, 256, dtype=torch.uint8),
            "scales": torch.ones(256, 2),
            "zeros": torch.ones(256, 2, dtype=torch.uint8),
        },
    ),
    "Experts.load_blocks": lambda: (
        empty("q4_k").load_blocks,
        {"projection": "up", "expert": 0, "rows": torch.zeros(256, 144, dtype=torch.uint8)},
    ),
    "Experts.load_bias": lambda: (
        experts().load_bias,
        {"projection": "up", "expert": 0, "bias": torch.randn(32)},
    ),
    "Experts.unpack": lambda: (
        experts().unpack,
        {"projection": "up", "expert": 0, "out": torch.zeros(32, 64)},
    ),
    "Experts.unpack_bias": lambda: (
        experts().unpack_bias,
        {"projection": "down", "expert": 0, "out": torch.zeros(64)},
    ),
    "Experts.forward": lambda: (
        experts().forward,
        {
            "hidden_states": torch.randn(3, 64),
            "top_k_index": torch.tensor([[0, 1], [1, 0], [1, -1]]),
            "top_k_weights": torch.rand(3, 2),
            "out": torch.zeros(3, 64),
        },
    ),
    "Linear.load": lambda: (linear(32, 64).load, {"weight": torch.randn(32, 64)}),
    "Linear.load_fp8": lambda: (
        unfilled("fp8").load_fp8,
        {"codes": torch.zeros(64, 256, dtype=torch.uint8), "scales": torch.ones(1, 2)},
    ),
    "Linear.load_nvfp4": lambda: (
        unfilled("nvfp4").load_nvfp4,
        {
            "codes": torch.zeros(64, 128, dtype=torch.uint8),
            "scales": torch.zeros(64, 16, dtype=torch.uint8),
            "factor": 1.0,
        },
    ),
    "Linear.load_integers": lambda: (
        unfilled("int4", 128, symmetric=False).load_integers,
        {
            "codes": torch.ones(64, 256, dtype=torch.uint8),
            "scales": torch.ones(64, 2),
            "zeros": torch.ones(64, 2, dtype=torch.uint8),
        },
    ),
    "Linear.load_blocks": lambda: (
        unfilled("q4_k").load_blocks,
        {"rows": torch.zeros(64, 144, dtype=torch.uint8)},
    ),
    "Linear.load_bias": lambda: (linear(32, 64).load_bias, {"bias": torch.randn(32)}),
    "Linear.unpack": lambda: (linear(32, 64).unpack, {"out": torch.zeros(32, 64)}),
    "Linear.unpack_bias": lambda: (linear(32, 64).unpack_bias, {"out": torch.zeros(32)}),
    "Linear.forward": lambda: (linear(32, 64).forward, {"x": torch.randn(3, 64), "out": torch.zeros(3, 32)}),
    "norm_rows": lambda: (
        _native.norm_rows,
        {"x": torch.randn(3, 8), "weight": torch.ones(8), "epsilon": 1e-6, "out": torch.zeros(3, 8)},
    ),
    "choose": lambda: (
        _native.choose,
        {
            "scores": torch.randn(2, 9),
            "generator": generator(),
            "tokens": torch.zeros(2, dtype=torch.int64),
        },
    ),
    "TokenChoice.__init__": lambda: (choose_and_take, token_choice()),
    "TokenChoice.choose": lambda: (
        _native.TokenChoice(**token_choice()).choose,
        {"scores": torch.randn(2, 9), "generator": generator()},
    ),
    "NextPlace.__init__": lambda: (lambda **given: _native.NextPlace(**given).advance(), next_place()),
    "TokenStep.__init__": lambda: (run_step, token_step()),
    "TokenStep.turn": lambda: (
        _native.TokenStep(**token_step()).turn,
        {"cos": torch.ones(2, 16), "sin": torch.zeros(2, 16), "first": 3},
    ),
    "convolve_prompt": lambda: (
        _native.convolve_prompt,
        {
            "x": torch.ones(2, 5, 8),
            "weight": torch.ones(4, 8),
            "bias": torch.ones(8),
            "silu": True,
            "out": torch.zeros(2, 5, 8),
        },
    ),
    "delta_prompt": lambda: (
        _native.delta_prompt,
        {
            **{name: torch.rand(2, 5, 2, 8) for name in "qkv"},
            **{name: torch.rand(2, 5, 2) for name in ("g", "beta")},
            "unit_length": True,
            "scale": 1.0,
            "states": torch.zeros(2, 2, 8, 8),
            "out": torch.zeros(2, 5, 2, 8),
        },
    ),
    "attend_prompt": lambda: (
        _native.attend_prompt,
        {
            **{name: torch.rand(2, 5, 2, 8) for name in "qkv"},
            "mask": torch.ones(2, 1, 5, 5),
            "lowest": -1.0,
            "sinks": torch.ones(2),
            "scale": 1.0,
            "out": torch.zeros(2, 5, 2, 8),
        },
    ),
    "Norm.__init__": lambda: (
        _native.Norm,
        {
            "weight": torch.ones(8),
            "epsilon": 1e-6,
            "rounds_first": False,
            "centred": True,
            "bias": torch.zeros(8),
        },
    ),
    "DecoderCache.__init__": lambda: (
        _native.DecoderCache,
        {
            **{name: [torch.zeros(2, 2, 8, 16)] for name in ("first", "second")},
            "third": [torch.zeros(2, 1, 8, 4)],
            "parts": [torch.zeros(2, 1, 3, 4)],
            "part_counts": [1],
        },
    ),
    "HyperConnection.__init__": lambda: (
        _native.HyperConnection,
        {
            "streams": 2,
            "hidden": 8,
            "fn": torch.zeros(8, 16),
            "base": torch.zeros(8),
            "scale": torch.zeros(3),
            "iterations": 1,
        },
    ),
    "Compressor.__init__": lambda: (_native.Compressor, compressor()),
    "SharedKeyAttention.__init__": lambda: (_native.SharedKeyAttention, shared_key()),
    "Projection.__init__": lambda: (
        _native.Projection,
        {"weight": torch.zeros(4, 8), "bias": torch.zeros(4)},
    ),
    "Indexer.__init__": lambda: (_native.Indexer, indexer()),
    "PooledIndex.__init__": lambda: (_native.PooledIndex, pooled_index()),
    "GroupedAttention.__init__": lambda: (
        _native.GroupedAttention,
        with_sinks(gate=linear(64, 64), gate_bias=torch.zeros(4)),
    ),
    "DecayingState.__init__": lambda: (_native.DecayingState, decaying()),
    "GatedDelta.__init__": lambda: (_native.GatedDelta, delta()),
    "ShortConvolution.__init__": lambda: (_native.ShortConvolution, convolution()),
    "Mamba1.__init__": lambda: (_native.Mamba1, mamba1()),
    "Mamba2.__init__": lambda: (_native.Mamba2, mamba()),
    "LatentAttention.__init__": lambda: (_native.LatentAttention, latent()),
    "Mixture.__init__": lambda: (_native.Mixture, mixture()),
    "Decoder.add": lambda: (
        _native.Decoder(64, "float32").add,
        {
            "before_attention": None,
            "attention": None,
            "before_feed_forward": None,
            "feed_forward": _native.GatedUnit(linear(32, 64), linear(32, 64), linear(64, 32)),
            "scale": torch.ones(1),
        },
    ),
    "Decoder.forward": decoder,
}


def misfits(array: Wanted, right: Tensor) -> Iterator[tuple[str, Any]]:
    """What does not fit, and why."""
    apart = torch.stack([right, right], -1)[..., 0]
    yield "rank", right.unsqueeze(0)
    yield "device", right.to("meta")
    yield "no array", right.tolist()
    if array.dtype is not None or array.written:
        yield "dtype", right.to(torch.int16 if right.dtype == torch.float32 else torch.float32)
        yield "float64", right.double()
    assert torch.equal(apart, right) and apart.is_contiguous() == (right.numel() == 1)
    if array.contiguous and right.numel() > 1:
        yield "strides", apart
        yield "numpy strides", apart.numpy()
    if array.written:
        fixed = right.clone().numpy()
        fixed.flags.writeable = False
        yield "read-only", fixed
        for dim in range(right.dim() if not array.is_list else 0):
            yield f"longer in dimension {dim}", right.repeat_interleave(2, dim)
            yield f"empty in dimension {dim}", right.narrow(dim, 0, 0)


def given(array: Wanted, value: Any) -> Any:
    return [value] if array.is_list else value


def test_every_binding_that_takes_an_array_has_a_case() -> None:
    assert {array.binding for array in ARRAYS} == CASES.keys()
    assert sum(array.written for array in ARRAYS) >= 10


@pytest.mark.parametrize("binding", CASES)
def test_what_fits_is_written_where_it_is(binding: str) -> None:
    function, arguments = CASES[binding]()
    written = [array for array in ARRAYS if array.binding == binding and array.written and not array.is_list]
    before = {array.argument: arguments[array.argument].clone() for array in written}
    function(**arguments)
    for name, old in before.items():
        assert not torch.equal(arguments[name], old), name


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_what_does_not_fit_is_refused(array: Wanted) -> None:
    function, arguments = CASES[array.binding]()
    right = arguments[array.argument]
    right = right[0] if array.is_list else right
    accepted = []
    for why, wrong in misfits(array, right):
        try:
            function(**arguments | {array.argument: given(array, wrong)})
        except (TypeError, ValueError):
            continue
        accepted.append(why)
    assert not accepted
    function(**arguments)


def test_arrays_of_numpy_and_parameters_are_taken() -> None:
    native, x = linear(32, 64), torch.randn(3, 64)
    want = torch.zeros(3, 32)
    native.forward(x, want)
    out = numpy.zeros((3, 32), numpy.float32)
    native.forward(x.numpy(), out)
    assert torch.equal(torch.from_numpy(out), want)
    found = torch.zeros(3, 32)
    native.forward(torch.nn.Parameter(x), found)
    assert torch.equal(found, want)


def test_a_signal_is_not_lost_where_an_array_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code that runs while an array is taken may be interrupted, and nanobind would drop that: none does."""
    called = []

    def interrupted(*_: Any, **__: Any) -> Any:
        called.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tensor, "__dlpack__", interrupted)
    native, out = linear(32, 64), torch.zeros(3, 32)
    native.forward(torch.randn(3, 64), out)
    assert out.any() and not called


class Endless(list):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 2**50


def test_a_list_that_memory_does_not_hold_is_an_error() -> None:
    with pytest.raises(MemoryError):
        _native.find_nodes("/", Endless(), [])


def test_a_list_of_something_else_is_refused_by_its_item() -> None:
    with pytest.raises(TypeError, match=r"cpus\[1\]: found str, which is not taken"):
        _native.find_nodes("/", [0, "1"], [])
    keys = torch.zeros(1, 1, 4, 2)
    with pytest.raises(TypeError, match=r"second\[0\]: found list"):
        _native.DecoderCache([keys], [[keys]])
    with pytest.raises(ValueError, match="found a tensor of 2 dimensions; expected 3 or 4"):
        _native.DecoderCache([keys], [keys[0, 0]])


@pytest.mark.parametrize("left, following", [(624, 2), (600, 600), (0, 1), (625, 0), (1, 625), (2, 624)])
def test_a_generators_state_that_does_not_hold_together_is_refused(left: int, following: int) -> None:
    """The words that are left lie from the next one on; beyond the state there are none."""
    state = generator()
    state[8:12].view(torch.int32)[0], state[16:24].view(torch.int64)[0] = left, following
    before = state.clone()
    with pytest.raises(ValueError, match="not the state of torch's generator"):
        _native.choose(scores=torch.randn(1, 9), generator=state, tokens=torch.zeros(1, dtype=torch.int64))
    assert torch.equal(state, before)


def test_a_generators_states_are_taken_as_torch_leaves_them() -> None:
    made = torch.Generator().manual_seed(3)
    for drawn in (0, 1, 622, 1, 1):
        torch.rand(drawn, generator=made)
        state = made.get_state()
        _native.choose(scores=torch.randn(1, 9), generator=state, tokens=torch.zeros(1, dtype=torch.int64))
        torch.Generator().set_state(state)
