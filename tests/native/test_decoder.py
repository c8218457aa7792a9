"""The parts of a decode step in the native core: attention over long caches, the choice of tokens, and refusals.

Whole layers are compared with transformers' in tests/ktinject/generation/test_native_decoder.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention import grouped
from silu_layers import silu_experts
from test_arrays import latent, mixture, next_place
from torch import Tensor

from ktinject import OperatorError, _native
from ktinject.generation.sampling import _drawn, _drawn_by_torch, _draws_as_torch, greatest
from tests.reference import relative_error

HIDDEN = 64
# Linears round their input to bf16; so does the cache where it is bf16.
TOLERANCE = 6e-3


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Four workers, so that stretches of the cache are dealt out also on a small machine."""
    _native.set_threads(4, crowded=True)
    yield
    _native.set_threads(0)


def linear(out_features: int, in_features: int, weights: str = "bf16") -> tuple[Any, Tensor]:
    native = _native.Linear(
        out_features=out_features,
        in_features=in_features,
        weights=weights,
        group_size=0,
        has_bias=False,
        kernel="auto",
    )
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).bfloat16()
    native.allocate()
    native.load(weight)
    return native, weight.float()


class Layer:
    """One layer whose feed-forward part adds nothing, so that the output is x + attention(norm(x))."""

    def __init__(self, attention: Any, dtype: torch.dtype = torch.float32) -> None:
        ones = torch.ones(HIDDEN, dtype=dtype)
        silent = _native.Linear(
            out_features=HIDDEN, in_features=32, weights="bf16", group_size=0, has_bias=False, kernel="auto"
        )
        silent.allocate()
        silent.load(torch.zeros(HIDDEN, 32))
        unit = _native.GatedUnit(linear(32, HIDDEN)[0], linear(32, HIDDEN)[0], silent)
        self.decoder = _native.Decoder(HIDDEN, str(dtype).removeprefix("torch."))
        self.decoder.add(_native.Norm(ones, 1e-6), attention, _native.Norm(ones, 1e-6), unit)

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, position: int, **others: Any) -> Tensor:
        out = torch.empty_like(x)
        arguments = {
            "cos": None,
            "sin": None,
            "mask": None,
            "first": 0,
            "last": 1,
            "final_norm": None,
        } | others
        cache = _native.DecoderCache([keys], [values])
        self.decoder.forward(x=x, position=position, cache=cache, out=out, **arguments)
        return out - x


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """x [..., n], its first values turned."""
    n = cos.shape[-1]
    one, rest = x[..., :n], x[..., n:]
    a, b = (one[..., ::2], one[..., 1::2]) if neighbours else one.chunk(2, -1)
    half = torch.cat([a, b], -1)
    return torch.cat([half * cos + torch.cat([-b, a], -1) * sin, rest], -1)


def rotation(batch: int, n: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(batch, n // 2).repeat(1, 2) * 6
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("position", [0, 31, 32, 700, 2047])
@pytest.mark.parametrize("heads, groups, size, rotary", [(4, 2, 32, 32), (24, 1, 40, 16), (6, 6, 20, 0)])
def test_grouped_attention_over_any_length(
    heads: int, groups: int, size: int, rotary: int, position: int
) -> None:
    torch.manual_seed(0)
    batch = 2
    q, wq = linear(heads * size, HIDDEN)
    k, wk = linear(groups * size, HIDDEN)
    v, wv = linear(groups * size, HIDDEN)
    o, wo = linear(HIDDEN, heads * size)
    layer = Layer(_native.GroupedAttention(**grouped(q, k, v, o, heads=heads, groups=groups, size=size)))
    keys, values = torch.randn(2, batch, groups, 2048, size).unbind()
    x, mask = torch.randn(batch, HIDDEN), torch.rand(batch, 2048) < 0.7
    mask[1, :500] = False  # padding: whole stretches without a position
    mask[:, position] = True
    cos, sin = rotation(batch, rotary)
    tables = {"cos": cos, "sin": sin} if rotary else {}
    inner = normed(x)
    new_q = turned((inner @ wq.T).view(batch, heads, size), cos[:, None], sin[:, None])
    new_k = turned((inner @ wk.T).view(batch, groups, size), cos[:, None], sin[:, None])
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[:, :, position], want_values[:, :, position] = new_k, (inner @ wv.T).view(batch, groups, size)
    want = torch.nn.functional.scaled_dot_product_attention(
        new_q[:, :, None], want_keys[:, :, : position + 1], want_values[:, :, : position + 1],
        attn_mask=mask[:, None, None, : position + 1], enable_gqa=True,
    ).reshape(batch, -1) @ wo.T  # fmt: skip
    found = layer(x, keys, values, position, mask=mask, **tables)
    assert relative_error(found, want) <= TOLERANCE
    assert relative_error(keys, want_keys) <= TOLERANCE and relative_error(values, want_values) <= TOLERANCE


@pytest.mark.parametrize("position", [40, 700, 2047])
@pytest.mark.parametrize("kind", ["plain", "normed", "gated", "gate of its own", "v in another format"])
def test_a_token_in_one_call_is_that_in_several(kind: str, position: int) -> None:
    """With one thread, products and attention are calls of their own."""
    torch.manual_seed(0)
    heads, groups, size = 16, 2, 128
    others: dict[str, Any] = {"gated": kind == "gated"}
    if kind == "normed":
        others |= {name: _native.Norm(torch.rand(size), 1e-6) for name in ("q_norm", "k_norm")}
    if kind == "gate of its own":
        others["gate"] = linear(heads, HIDDEN)[0]
    q = linear(heads * size * (2 if others["gated"] else 1), HIDDEN)[0]
    k = linear(groups * size, HIDDEN)[0]
    v = linear(groups * size, HIDDEN, "int8" if kind == "v in another format" else "bf16")[0]
    o = linear(HIDDEN, heads * size)[0]
    layer = Layer(
        _native.GroupedAttention(**grouped(q, k, v, o, heads=heads, groups=groups, size=size, **others))
    )
    keys, values = torch.randn(2, 1, groups, 2048, size).unbind()
    assert turns_spared(layer, keys, values, position, size) == 3


def turns_spared(layer: Layer, keys: Tensor, values: Tensor, position: int, rotary: int) -> int:
    """How many turns at the pool fewer a token takes with four threads than with one; its results are the same."""
    x = torch.randn(1, HIDDEN)
    tables = dict(zip(("cos", "sin"), rotation(1, rotary), strict=True)) if rotary else {}
    results, turns = [], []
    for threads in (4, 1):
        _native.set_threads(threads, crowded=True)
        own_keys, own_values = keys.clone(), values.clone()
        before = _native.sessions()
        out = layer(x, own_keys, own_values, position, **tables)
        turns.append(_native.sessions() - before)
        results.append((out, own_keys, own_values))
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    return turns[1] - turns[0]


@pytest.mark.parametrize("position", [40, 700, 2047])
@pytest.mark.parametrize("is_low", [False, True])
def test_a_token_s_latent_attention_in_one_call_is_that_in_several(is_low: bool, position: int) -> None:
    torch.manual_seed(0)
    heads, rank, nope, rope, value = 16, 128, 96, 32, 128
    low = 1024
    queries: dict[str, Any] = {
        "q": linear(heads * (nope + rope), HIDDEN)[0],
        **dict.fromkeys(("q_a", "q_norm", "q_b")),
    }
    if is_low:
        norm = _native.Norm(torch.rand(low), 1e-6)
        queries = {"q": None, "q_a": linear(low, HIDDEN)[0], "q_norm": norm, "q_b": linear(2048, low)[0]}
    layer = Layer(
        _native.LatentAttention(
            **queries,
            kv=linear(rank + rope, HIDDEN)[0],
            kv_norm=_native.Norm(torch.rand(rank), 1e-6),
            expansion=torch.randn(heads * (nope + value), rank) * rank**-0.5,
            o=linear(HIDDEN, heads * value)[0],
            heads=heads, rank=rank, nope=nope, rope=rope, value=value, neighbours=False, scale=0.2,
        )
    )  # fmt: skip
    keys, values = torch.randn(1, 1, 2048, rank), torch.randn(1, 1, 2048, rope)
    assert turns_spared(layer, keys, values, position, rope) == (6 if is_low else 4)


def plain(out_features: int, in_features: int) -> Any:
    """A projection whose weight stays as it is."""
    weight, bias = torch.randn(out_features, in_features) * in_features**-0.5, torch.randn(out_features)
    return _native.Projection(weight=weight, bias=bias)


def packed(out_features: int, in_features: int) -> Any:
    return _native.Projection(linear=linear(out_features, in_features)[0])


def delta_rule(kind: str) -> tuple[Any, Tensor, Tensor]:
    """A layer, and the two tensors of its cache."""
    heads, size, hidden, taps = 16, 128, HIDDEN, 4
    values, low = heads * size, 96
    channels = 3 * values
    is_low = kind in ("low", "low z")
    decays = values if is_low else heads
    layers: dict[str, Any] = {"qkv": linear(channels, hidden)[0], "z": linear(values, hidden)[0]}
    layers |= {"ba": plain(heads, hidden), "a": plain(heads, hidden)}
    if kind == "in parts":
        layers |= {
            name: linear(values, hidden, "int8" if name == "v" else "bf16")[0] for name in ("qkv", "k", "v")
        }
    if kind == "interleaved":
        layers = {
            "qkv": linear(channels + values, hidden)[0],
            "ba": packed(2 * heads, hidden),
            "z": None,
            "a": None,
        }
    if is_low:
        layers |= {"z_low": linear(low, hidden)[0], "z": linear(values, low)[0], "a": packed(decays, hidden)}
    if kind == "low":
        layers |= {"a_low": plain(low, hidden), "a": packed(decays, low)}
    made = _native.GatedDelta(
        **layers, o=linear(hidden, values)[0], taps=torch.randn(channels, taps), a_log=torch.rand(heads),
        dt_bias=torch.rand(decays), norm=_native.Norm(torch.rand(size), 1e-6), key_heads=heads,
        value_heads=heads, key_size=size, value_size=size, by_channels=is_low,
    )  # fmt: skip
    return made, torch.randn(1, channels, taps), torch.randn(1, heads, size, size)


def recurrent(kind: str) -> tuple[Any, Tensor, Tensor]:
    heads, size, hidden, taps = 32, 64, HIDDEN, 4
    values, states = heads * size, 32
    outward, rate = linear(hidden, values)[0], torch.rand(heads)
    if kind == "decaying":
        made = _native.DecayingState(
            qkv=linear(3 * values, hidden)[0], gate=linear(values, hidden)[0], o=outward,
            norm=_native.Norm(torch.rand(values), 1e-6), slopes=rate, heads=heads, size=size,
        )  # fmt: skip
        state = torch.randn(1, heads, size, size)
        return made, state, state
    if kind == "short convolution":
        taps_weight = torch.randn(values, taps)
        made = _native.ShortConvolution(
            in_proj=linear(3 * values, hidden)[0], out_proj=outward, taps=taps_weight
        )
        state = torch.randn(1, values, taps)
        return made, state, state
    if kind == "mamba":
        rank = 48
        made = _native.Mamba1(
            in_proj=linear(2 * values, hidden)[0], x_proj=packed(rank + 2 * states, values),
            dt_proj=plain(values, rank), out_proj=outward, taps=torch.randn(values, taps), taps_bias=None,
            a_log=torch.rand(values, states), d=torch.rand(values), has_wide_d=False,
            **{f"{name}_norm": _native.Norm(torch.rand(n), 1e-6) for name, n in
               (("dt", rank), ("b", states), ("c", states))},
        )  # fmt: skip
        return made, torch.randn(1, values, taps), torch.randn(1, values, states)
    groups = 4
    channels = values + 2 * groups * states
    made = _native.Mamba2(
        in_proj=linear(values + channels + heads, hidden)[0], out_proj=outward, taps=torch.randn(channels, taps),
        taps_bias=torch.randn(channels), a_log=rate, dt_bias=torch.rand(heads), d=torch.rand(heads),
        has_wide_d=False, norm=_native.Norm(torch.rand(values), 1e-6), heads=heads, groups=groups, head_size=size,
        state_size=states,
    )  # fmt: skip
    return made, torch.randn(1, channels, taps), torch.randn(1, heads, size, states)


@pytest.mark.parametrize(
    "kind, spared", [("whole", 5), ("in parts", 5), ("interleaved", 3), ("low z", 5), ("low", 7)]
)
def test_a_token_s_delta_rule_in_one_call_is_that_in_several(kind: str, spared: int) -> None:
    torch.manual_seed(0)
    made, inputs, states = delta_rule(kind)
    assert turns_spared(Layer(made), inputs, states, 3, 0) == spared


@pytest.mark.parametrize(
    "kind, spared", [("decaying", 3), ("short convolution", 3), ("mamba", 6), ("mamba-2", 3)]
)
def test_a_token_s_states_in_one_call_are_those_of_several(kind: str, spared: int) -> None:
    torch.manual_seed(0)
    made, inputs, states = recurrent(kind)
    assert turns_spared(Layer(made), inputs, states, 3, 0) == spared


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "parallel"])
def test_a_router_in_attention_s_call_is_that_behind_it(kind: str, is_packed: bool) -> None:
    torch.manual_seed(0)
    count = 64 if is_packed else 1664  # so that the weight is worth a call
    parts = (linear(n, HIDDEN)[0] for n in (2048, 256, 256))
    attention = _native.GroupedAttention(
        **grouped(*parts, linear(HIDDEN, 2048)[0], heads=16, groups=2, size=128)
    )
    native = silu_experts(count, HIDDEN, 32, "bf16")
    native.allocate()
    for i in range(count):
        for name, shape in (("gate", (32, HIDDEN)), ("up", (32, HIDDEN)), ("down", (HIDDEN, 32))):
            native.load(name, i, torch.randn(shape) * 0.1)
    router = {"router": linear(count, HIDDEN)[0], "weight": None, "bias": None} if is_packed else {
        "weight": torch.randn(count, HIDDEN), "bias": torch.randn(count)
    }  # fmt: skip
    changed = {"experts": native, "correction": None, "expert_factors": None, "table": None, "shared": None}
    unit = _native.Mixture(**mixture() | changed | {"gate": None, "top_k": 4, "scores": "softmax"} | router)
    layer = Layer.__new__(Layer)
    layer.decoder = _native.Decoder(HIDDEN, "float32")
    norm = _native.Norm(torch.rand(HIDDEN), 1e-6)
    is_parallel = kind == "parallel"
    layer.decoder.add(norm, attention, None if is_parallel else norm, unit, parallel=is_parallel)
    keys, values = torch.randn(2, 1, 2, 2048, 128).unbind()
    assert turns_spared(layer, keys, values, 500, 128) == 4


@pytest.mark.parametrize("kind", ["gate and up", "both in one", "up alone"])
def test_a_token_s_feed_forward_in_one_call_is_that_in_several(kind: str) -> None:
    torch.manual_seed(0)
    inner = 2048
    down = linear(HIDDEN, inner)[0]
    if kind == "up alone":
        unit = _native.PlainUnit(linear(inner, HIDDEN)[0], down)
    elif kind == "gate and up":
        unit = _native.GatedUnit(linear(inner, HIDDEN)[0], linear(inner, HIDDEN)[0], down)
    else:
        unit = _native.GatedUnit(linear(2 * inner, HIDDEN)[0], None, down)
    decoder = _native.Decoder(HIDDEN, "float32")
    decoder.add(None, None, _native.Norm(torch.ones(HIDDEN), 1e-6), unit)
    x, results, turns = torch.randn(1, HIDDEN), [], []
    for threads in (4, 1):
        _native.set_threads(threads, crowded=True)
        out, before = torch.empty_like(x), _native.sessions()
        cache = _native.DecoderCache([torch.empty(1, 1, 1, 1)], [torch.empty(1, 1, 1, 1)])
        decoder.forward(x=x, position=0, cache=cache, out=out, cos=None, sin=None, mask=None, first=0, last=1,
                        final_norm=None)  # fmt: skip
        turns.append(_native.sessions() - before)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert turns[1] - turns[0] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("size, rotary", [(32, 32), (20, 12), (16, 0)])
def test_keys_are_turned_as_torch_turns_them(
    size: int, rotary: int, neighbours: bool, norms_last: bool, is_wide: bool, dtype: torch.dtype
) -> None:
    """With its roundings, tables in fp32 included: of a product that is the same on both sides."""
    torch.manual_seed(0)
    batch, heads, groups = 2, 4, 2
    k, wk = linear(groups * size, HIDDEN)
    parts = (
        linear(heads * size, HIDDEN)[0],
        k,
        linear(groups * size, HIDDEN)[0],
        linear(HIDDEN, heads * size)[0],
    )
    weight = (torch.rand(size) + 0.5).to(dtype)
    norms = dict.fromkeys(("q_norm", "k_norm"), _native.Norm(weight, 1e-6))
    sizes = {"heads": heads, "groups": groups, "size": size}
    layer = Layer(
        _native.GroupedAttention(
            **grouped(*parts, **sizes, **norms, neighbours=neighbours, norms_last=norms_last)
        ),
        dtype,
    )
    keys, values = torch.zeros(2, batch, groups, 8, size, dtype=dtype).unbind()
    # Inputs of which the norm is 1, so that products are exact whatever the order of sums.
    x = torch.ones(batch, HIDDEN, dtype=dtype)
    cos, sin = (table.to(torch.float32 if is_wide else dtype) for table in rotation(batch, rotary))
    layer(x, keys, values, 3, **({"cos": cos, "sin": sin} if rotary else {}))
    given = (normed(x.float()).bfloat16().float() @ wk.T).to(dtype).view(batch, groups, size)

    def rms(x: Tensor) -> Tensor:
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * (x.float() * inverse).to(dtype)

    def turn(x: Tensor) -> Tensor:
        one, rest = x[..., :rotary], x[..., rotary:]
        tables = [part[:, None] for part in (cos, sin)]
        if neighbours:
            tables = [part[..., : rotary // 2].repeat_interleave(2, -1) for part in tables]
            across = torch.stack([-one[..., 1::2], one[..., ::2]], -1).flatten(-2)
        else:
            across = torch.cat([-one[..., rotary // 2 :], one[..., : rotary // 2]], -1)
        return torch.cat([(one * tables[0] + across * tables[1]).to(dtype), rest], -1)

    want = rms(turn(given)) if norms_last else turn(rms(given))
    # The product may be rounded to the other side, and what follows with it.
    assert relative_error(keys[:, :, 3].float(), want.float()) <= {torch.bfloat16: 3e-3}.get(dtype, 1e-3)
    assert not keys[:, :, :3].any() and not keys[:, :, 4:].any()


@pytest.mark.parametrize("position", [0, 40, 1023])
@pytest.mark.parametrize("neighbours", [False, True])
def test_latent_attention_over_any_length(position: int, neighbours: bool) -> None:
    torch.manual_seed(0)
    batch, heads, rank, nope, rope, value = 2, 20, 48, 24, 16, 12
    q, wq = linear(heads * (nope + rope), HIDDEN)
    kv, wkv = linear(rank + rope, HIDDEN)
    o, wo = linear(HIDDEN, heads * value)
    expansion = torch.randn(heads * (nope + value), rank) * rank**-0.5
    layer = Layer(
        _native.LatentAttention(
            q=q,
            q_a=None,
            q_norm=None,
            q_b=None,
            kv=kv,
            kv_norm=_native.Norm(torch.ones(rank), 1e-6),
            expansion=expansion,
            o=o,
            heads=heads,
            rank=rank,
            nope=nope,
            rope=rope,
            value=value,
            neighbours=neighbours,
            scale=0.2,
        )
    )
    keys, values = torch.randn(batch, 1, 1024, rank), torch.randn(batch, 1, 1024, rope)
    x, mask = torch.randn(batch, HIDDEN), torch.rand(batch, 1024) < 0.7
    mask[1, :500] = False
    mask[:, position] = True
    cos, sin = rotation(batch, rope)
    inner = normed(x)
    query = (inner @ wq.T).view(batch, heads, -1)
    both = inner @ wkv.T
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[:, 0, position] = normed(both[:, :rank])
    want_values[:, 0, position] = turned(both[:, rank:], cos, sin, neighbours)
    expanded = (
        (want_keys[:, 0, : position + 1] @ expansion.T).view(batch, position + 1, heads, -1).transpose(1, 2)
    )
    k = torch.cat([expanded[..., :nope], want_values[:, :, : position + 1].expand(-1, heads, -1, -1)], -1)
    new_q = torch.cat(
        [query[..., :nope], turned(query[..., nope:], cos[:, None], sin[:, None], neighbours)], -1
    )
    want = (
        torch.nn.functional.scaled_dot_product_attention(
            new_q[:, :, None],
            k,
            expanded[..., nope:],
            attn_mask=mask[:, None, None, : position + 1],
            scale=0.2,
        ).reshape(batch, -1)
        @ wo.T
    )
    found = layer(x, keys, values, position, mask=mask, cos=cos, sin=sin)
    assert relative_error(found, want) <= TOLERANCE
    assert relative_error(keys, want_keys) <= TOLERANCE and relative_error(values, want_values) <= TOLERANCE


@pytest.mark.parametrize("neighbours", [False, True])
def test_latent_attention_turned_in_fp32_is_rounded_at_the_end(neighbours: bool) -> None:
    """By cos and sin in fp32; by quarter turns, which no dtype rounds, it is as by those in bf16."""
    torch.manual_seed(3)
    arguments = latent() | {"neighbours": neighbours, "scale": 0.01}
    arguments["kv_norm"] = _native.Norm(torch.ones(32, dtype=torch.bfloat16), 1e-6)
    arguments["expansion"] = arguments["expansion"].bfloat16()
    layer = Layer(_native.LatentAttention(**arguments), torch.bfloat16)
    x, held = torch.randn(1, HIDDEN).bfloat16(), [torch.randn(1, 1, 8, n).bfloat16() for n in (32, 8)]

    def step(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        latents, keys = (tensor.clone() for tensor in held)
        return layer(x, latents, keys, 5, cos=cos, sin=sin), keys[0, 0, 5]

    ones, zeros = torch.ones(1, 8), torch.zeros(1, 8)
    quarter = step(zeros, ones)
    assert all(map(torch.equal, quarter, step(zeros.bfloat16(), ones.bfloat16())))
    angles = torch.rand(1, 4).repeat(1, 2)
    out, key = step(angles.cos(), angles.sin())
    plain = step(ones, zeros)[1].float()
    if neighbours:  # pairs lie apart behind a turn, also behind one by nothing
        plain = plain.view(2, 4).T.flatten()
    assert torch.equal(key, turned(plain, angles.cos()[0], angles.sin()[0], neighbours).bfloat16())
    assert not torch.equal(out, quarter[0])


@pytest.mark.parametrize("heads", [40, 6])
@pytest.mark.parametrize(
    "row", [row for row in _native.kernels() if row["weights"] == "bf16"], ids=lambda r: r["name"]
)
def test_latent_attention_of_every_instruction_set(row: dict[str, Any], heads: int) -> None:
    """In bf16, where AMX has its tiles, over stretches that end within a tile and have places that are masked."""
    if not row["available"]:
        pytest.skip(str(row["reason"]))
    rank, nope, rope, value, dtype = 64, 24, 32, 12, torch.bfloat16

    def steps(kernel: str) -> list[Tensor]:
        _native.force_kernel(kernel)
        torch.manual_seed(0)
        q, kv, o = (
            linear(heads * (nope + rope), HIDDEN),
            linear(rank + rope, HIDDEN),
            linear(HIDDEN, heads * value),
        )
        layer = Layer(
            _native.LatentAttention(
                q=q[0], q_a=None, q_norm=None, q_b=None, kv=kv[0],
                kv_norm=_native.Norm(torch.ones(rank, dtype=dtype), 1e-6),
                expansion=(torch.randn(heads * (nope + value), rank) * rank**-0.5).to(dtype), o=o[0], heads=heads,
                rank=rank, nope=nope, rope=rope, value=value, neighbours=False, scale=0.2,
            ),
            dtype,
        )  # fmt: skip
        keys, values = torch.randn(1, 1, 5000, rank).to(dtype), torch.randn(1, 1, 5000, rope).to(dtype)
        x, mask = torch.randn(1, HIDDEN).to(dtype) * 0.01, torch.rand(1, 5000) < 0.7
        mask[0, 128:400] = False
        found = []
        for position in (0, 15, 46, 129, 700, 4998):
            mask[0, position] = True
            found.append(layer(x, keys, values, position, mask=mask).float())
        return found

    try:
        for found, want in zip(steps(str(row["name"])), steps("reference_bf16"), strict=True):
            assert (
                relative_error(found, want) <= 1.2e-2
            )  # what bf16 rounds the output to, and the weights on tiles
    finally:
        _native.force_kernel("auto")


@pytest.mark.parametrize(
    "heads, groups, size, value", [(24, 3, 64, 64), (12, 1, 96, 32), (40, 2, 32, 96), (6, 2, 64, 64)]
)
@pytest.mark.parametrize(
    "row", [row for row in _native.kernels() if row["weights"] == "bf16"], ids=lambda r: r["name"]
)
def test_grouped_attention_of_every_instruction_set(
    row: dict[str, Any], heads: int, groups: int, size: int, value: int
) -> None:
    """In bf16, as latent attention above: 8, 12, 20 and 3 heads that share keys, with sinks."""
    if not row["available"]:
        pytest.skip(str(row["reason"]))
    dtype = torch.bfloat16

    def steps(kernel: str) -> list[Tensor]:
        _native.force_kernel(kernel)
        torch.manual_seed(0)
        parts = [linear(count, HIDDEN)[0] for count in (heads * size, groups * size, groups * value)] + [
            linear(HIDDEN, heads * value)[0]
        ]
        sizes = {"heads": heads, "groups": groups, "size": size, "value": value}
        layer = Layer(_native.GroupedAttention(**grouped(*parts, **sizes, sinks=torch.randn(heads))), dtype)
        keys = torch.randn(2, groups, 1100, size).to(dtype)
        values = torch.randn(2, groups, 1100, value).to(dtype)
        x, mask = torch.randn(2, HIDDEN).to(dtype) * 0.01, torch.rand(2, 1100) < 0.7
        mask[0, 128:400] = False
        found = []
        for position in (0, 15, 46, 129, 700, 1098):
            mask[:, position] = True
            found.append(layer(x, keys, values, position, mask=mask).float())
        return found

    try:
        for found, want in zip(steps(str(row["name"])), steps("reference_bf16"), strict=True):
            # What bf16 rounds the output to, and the weights on tiles.
            assert relative_error(found, want) <= 1.2e-2
    finally:
        _native.force_kernel("auto")


class TestChoice:
    @pytest.mark.parametrize("size", [1, 5, 311, 4097, 50_000])
    def test_is_torch_s_from_the_same_random_numbers(self, size: int) -> None:
        assert _draws_as_torch()
        for seed in range(12):
            torch.manual_seed(seed)
            scores = torch.randn(3, size) * (seed % 4 + 0.1)
            if seed % 2 and size > 1:
                scores[:, ::2] = -torch.inf
            generator = torch.get_rng_state()
            found, after = _drawn(scores), torch.get_rng_state()
            torch.set_rng_state(generator)
            assert torch.equal(found, _drawn_by_torch(scores, None))
            assert torch.equal(after, torch.get_rng_state())
            assert torch.equal(greatest(scores), scores.argmax(-1))

    def test_of_ties_the_first_is_taken(self) -> None:
        scores = torch.zeros(2, 40_000)
        scores[0, [9_000, 20_000]], scores[1, [39_999]] = 3.0, 1.0
        assert greatest(scores).tolist() == [9_000, 39_999]
        assert greatest(torch.full((1, 40_000), -2.0)).tolist() == [0]

    @pytest.mark.parametrize("at", [0, 7, 20_001])
    @pytest.mark.parametrize("value", ["nan", "-nan", "inf"])
    def test_of_what_is_not_finite_as_torch(self, value: str, at: int) -> None:
        scores = torch.randn(2, 40_000)
        scores[1, at] = -torch.tensor(torch.nan) if value == "-nan" else float(value)
        assert torch.equal(greatest(scores), scores.argmax(-1))
        before = torch.get_rng_state()
        with pytest.raises(OperatorError, match=f"greatest of row 1 is {'inf' if value == 'inf' else 'NaN'}"):
            _drawn(scores)
        assert torch.equal(before, torch.get_rng_state())
        with pytest.raises(OperatorError, match="greatest of row 0 is -inf; nothing can be drawn"):
            _drawn(torch.full((1, 5), -torch.inf))

    def test_follows_the_probabilities(self) -> None:
        torch.manual_seed(0)
        weights = torch.tensor([0.5, 0.3, 0.15, 0.05])
        drawn = torch.cat([_drawn(weights.log().expand(8, -1)) for _ in range(500)])
        assert torch.allclose(drawn.bincount(minlength=4) / len(drawn), weights, atol=0.03)

    @pytest.mark.parametrize(
        "state", [torch.zeros(5056, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)]
    )
    def test_refuses_another_state(self, state: Tensor) -> None:
        with pytest.raises(ValueError, match="generator"):
            _native.choose(
                scores=torch.zeros(1, 4), generator=state, tokens=torch.zeros(1, dtype=torch.int64)
            )


class TestRefusals:
    @pytest.fixture
    def layer(self) -> Layer:
        parts = {name: linear(32, HIDDEN)[0] for name in "qkv"}
        return Layer(
            _native.GroupedAttention(**grouped(**parts, o=linear(HIDDEN, 32)[0], heads=2, groups=2, size=16))
        )

    @pytest.mark.parametrize(
        "changed, why",
        [
            ({"position": 8}, "position 8 of a cache of 8"),
            ({"position": -1}, "position -1"),
            ({"x": torch.zeros(1, 32)}, "hidden states must be"),
            ({"x": torch.zeros(1, HIDDEN).bfloat16()}, "of the model's dtype"),
            ({"keys": torch.zeros(2, 2, 8, 16)}, r"found \[2, 2, 8, 16\] and \[1, 2, 8, 16\]"),
            ({"keys": torch.zeros(1, 2, 8, 16).bfloat16()}, "of the model's dtype"),
            ({"keys": torch.zeros(1, 2, 9, 16)}, r"found \[1, 2, 9, 16\] and \[1, 2, 8, 16\]"),
            (
                {"keys": torch.zeros(1, 1, 8, 16), "values": torch.zeros(1, 1, 8, 16)},
                r"expected \[1, 2, n, 16\] and \[1, 2, n, 16\]",
            ),
            ({"values": torch.zeros(1, 2, 8, 8)}, r"found \[1, 2, 8, 16\] and \[1, 2, 8, 8\]"),
            ({"mask": torch.ones(1, 3, dtype=torch.bool), "position": 3}, "the mask must be"),
            ({"cos": torch.ones(1, 16)}, "cos and sin belong together"),
            ({"cos": torch.ones(1, 32), "sin": torch.ones(1, 32)}, "more values are turned"),
            ({"cos": torch.ones(1, 15), "sin": torch.ones(1, 15)}, "rotary even"),
            (
                {"cos": torch.ones(1, 16).half(), "sin": torch.ones(1, 16).half()},
                "of the model's dtype or fp32",
            ),
            ({"cos": torch.ones(1, 16), "sin": torch.ones(1, 16).half()}, "of the model's dtype or fp32"),
            ({"last": 2}, "there are no such layers"),
            ({"final_norm": _native.Norm(torch.ones(32), 1e-6)}, "final norm must be one of 64 values"),
            ({"final_norm": _native.Norm(torch.ones(HIDDEN).bfloat16(), 1e-6)}, "of the model's dtype"),
        ],
    )
    def test_of_a_step(self, layer: Layer, changed: dict[str, Any], why: str) -> None:
        arguments: dict[str, Any] = {
            "x": torch.zeros(1, HIDDEN),
            "keys": torch.zeros(1, 2, 8, 16),
            "values": torch.zeros(1, 2, 8, 16),
            "position": 0,
        }
        layer(**arguments)
        with pytest.raises(ValueError, match=why):
            layer(**arguments | changed)

    def test_of_parts_that_do_not_fit(self) -> None:
        parts = {name: linear(32, HIDDEN)[0] for name in "qkvo"}
        with pytest.raises(ValueError, match="q_proj: expected 64 outputs"):
            _native.GroupedAttention(**grouped(**parts, heads=4, groups=2, size=16))
        norm = _native.Norm(torch.ones(32), 1e-6)
        with pytest.raises(ValueError, match="a norm of all heads at once behind the rotation"):
            _native.GroupedAttention(
                **grouped(**parts, heads=2, groups=2, size=16, q_norm=norm, k_norm=norm, norms_last=True)
                | {"o": linear(HIDDEN, 32)[0]}
            )
        with pytest.raises(ValueError, match="multiple of groups"):
            _native.GroupedAttention(**grouped(**parts, heads=3, groups=2, size=16))
        with pytest.raises(ValueError, match="do not fit together"):
            _native.GatedUnit(linear(32, HIDDEN)[0], linear(16, HIDDEN)[0], linear(HIDDEN, 32)[0])
        parts |= {name: linear(HIDDEN, HIDDEN)[0] for name in "qo"}
        attention = _native.GroupedAttention(**grouped(**parts, heads=4, groups=2, size=16))
        unit = _native.GatedUnit(linear(32, HIDDEN)[0], linear(32, HIDDEN)[0], linear(HIDDEN, 32)[0])
        right, wrong = (
            _native.Norm(torch.ones(HIDDEN, dtype=d), 1e-6) for d in (torch.float32, torch.bfloat16)
        )
        for norms in ((wrong, right), (right, wrong)):
            with pytest.raises(ValueError, match="norm must be of the model's dtype"):
                _native.Decoder(HIDDEN, "float32").add(norms[0], attention, norms[1], unit)

    def test_of_a_router(self) -> None:
        for changed in ({"weight": None}, {"router": linear(2, HIDDEN)[0]}):
            with pytest.raises(ValueError, match="either a linear layer or a weight"):
                _native.Mixture(**mixture() | changed)
        with pytest.raises(ValueError, match=r"the weight must be \[experts, hidden\]"):
            _native.Mixture(**mixture() | {"weight": torch.zeros(3, HIDDEN)})

    @pytest.mark.parametrize("odd", ["q", "v", "o"])
    def test_of_an_attention_of_another_width(self, odd: str) -> None:
        shapes = dict.fromkeys("qkv", (32, HIDDEN)) | {"o": (HIDDEN, 32)}
        shapes[odd] = (48, 32) if odd == "o" else (32, 48)
        parts = {name: linear(*shape)[0] for name, shape in shapes.items()}
        with pytest.raises(ValueError, match="attention: expected 64 values in and out"):
            Layer(
                _native.GroupedAttention(
                    **parts,
                    q_norm=None,
                    k_norm=None,
                    heads=2,
                    groups=2,
                    size=16,
                    scale=1.0,
                    window=0,
                    sinks=None,
                    gated=False,
                )
            )


def test_the_next_place_goes_round_in_rings() -> None:
    place, positions = torch.tensor([6]), torch.tensor([[6], [4]])
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    own, other = torch.tensor([2]), torch.tensor([3])
    rings = [torch.zeros(2, 1, 1, size, dtype=torch.bool) for size in (4, 5)]
    given = _native.NextPlace(
        place=place,
        positions=positions,
        mask=mask,
        capacity=9,
        windows=[3, 50],
        places=[own, other],
        rings=rings,
        prompt=1,
    )
    for _ in range(3):
        given.advance()
    assert (place.item(), positions.flatten().tolist()) == (9, [9, 7])
    assert mask.nonzero()[:, 3].tolist() == [7, 8] * 2  # there is no place 9
    assert (own.item(), other.item()) == (1 + (9 - 1) % 3, 9)
    assert rings[0].nonzero()[:, 3].tolist() == [1, 2, 3] * 2
    assert rings[1].nonzero()[:, 3].tolist() == [4] * 2  # shorter than its window: full before


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"windows": [0]}, "found a window of 0"),
        ({"prompt": -1}, "found a prompt of -1"),
        ({"places": []}, "each window has a place and a ring"),
        ({"rings": [torch.zeros(3, 1, 1, 2, dtype=torch.bool)]}, "masks must be"),
        ({"mask": torch.zeros(2, 1, 1, 0, dtype=torch.bool)}, "n at least 1"),
        ({"capacity": 9}, "found a mask of 8 places; expected 9"),
    ],
)
def test_a_next_place_that_does_not_fit_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _native.NextPlace(**next_place() | changes)
