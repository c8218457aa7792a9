"""Recorded steps of all kinds of layers: rings for windows, states of fixed size, masks by name or added to scores.

On a CPU, steps run on the tensors of a graph, and nothing that a graph could not hold may be in them; on a GPU they are
captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from test_generate import stock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

import ktinject
from ktinject.generation import masks, several
from ktinject.generation.cache import FixedCache
from ktinject.generation.cache_layers import LayerKind, tensors_of
from ktinject.generation.cuda import fused
from ktinject.support import SUPPORTED
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
WINDOW = {"sliding_window": 12}
TWO_KINDS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CHUNKS = {"attention_chunk_size": 12, "layer_types": ["chunked_attention", "full_attention"]}
INDEX = {"index_n_heads": 32}  # of two heads, many scores are 0, and the choice among equal ones is nobody's
# Blocks are longer than the padding of these texts.
BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_block_size": 6,
    "index_topk_blocks": 2,
}
# Windows of 5 and of 3 tokens, and fewer keys that an index chooses than there are; experts by the token's number.
HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
COMPRESSED = {
    **WINDOW,
    **INDEX,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {HEAVY: 5, SPARSE: 3},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cohere2_moe", TWO_KINDS),
    ("deepseek_v4", COMPRESSED),
    ("glm_moe_dsa", INDEX),  # it chooses some of the tokens
    ("gpt_oss", WINDOW),  # masks are added to scores
    ("kimi_linear", LINEAR),
    ("lfm2_moe", {}),  # a convolution alone
    ("llama4_text", CHUNKS),
    ("minimax_m3_vl_text", BLOCKS),
    ("mimo_v2_flash", WINDOW),
    ("mixtral", WINDOW),  # one mask for all
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "moe"]}),
    ("qwen3_5_moe_text", {}),
    ("qwen3_next", {}),
]
ON_GPU = [
    *CASES,
    ("afmoe", WINDOW),
    ("beam", WINDOW),
    ("deepseek_v32", INDEX),
    ("exaone_moe", WINDOW),
    ("flint", {}),
    ("gemma4_text", WINDOW),
    ("gpt_oss", {"sliding_window": 300}),
    ("hy_v4", INDEX),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    ("jamba", {}),
    ("laguna", TWO_KINDS),
    ("minimax", {}),
    ("qwen2_moe", {**TWO_KINDS, "use_sliding_window": True}),
]
# Of which no step can be captured, and why.
REASONS = {
    "zaya": "transformers does not say that ZayaForCausalLM is free of host decisions",
}
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def model_of(family: str, changes: dict[str, Any], device: str = "cpu") -> PreTrainedModel:
    model = tiny(family, **changes).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # a rounding error must not decide the next token
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # DeepSeek-V4's: token → experts
                table.random_(6, generator=torch.Generator(device).manual_seed(1))
    # A tiny model has room for all experts on the GPU; then nothing would be handed to the CPU.
    return ktinject.optimize(
        model,
        "auto",
        devices=["cpu"] if device == "cpu" else None,
        progress=False,
        variables={"gpu_experts": 0},
    )


def request(batch: int, length: int, new: int, device: str = "cpu", padding: int = 5) -> dict[str, Any]:
    ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {
        "input_ids": ids.to(device),
        "attention_mask": mask.to(device),
        "max_new_tokens": new,
        "do_sample": False,
        "eos_token_id": None,
    }


def assert_same_windows(ours: Any, theirs: Any) -> None:
    """Of cache layers with compressed keys: what else they hold."""
    for attribute, held in vars(theirs).items():
        for name, wanted in held.items() if isinstance(held, dict) else ():
            found, where = getattr(ours, attribute)[name], f"{attribute}[{name!r}]"
            if not isinstance(wanted, Tensor):
                assert found == wanted or (found, wanted) == (None, None), where
                continue
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), where
            assert (found - wanted).norm() <= 1e-3 * wanted.norm(), where


class HostDecisions(TorchDispatchMode):
    """Counts operations whose result or size the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:  # which depends on the data only if a mask selects
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        else:
            waits = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})
        if waits or func is torch.ops.aten.lift_fresh.default:  # the latter: a tensor of the host's values
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family, changes", CASES, ids=[family for family, _ in CASES])
def test_steps_on_a_graph_s_tensors(family: str, changes: dict[str, Any]) -> None:
    """The tokens of transformers' loop, in windows that are overrun, request after request."""
    model = model_of(family, changes)
    decoding = model.ktinject_decoding
    decoding.graphs = SUPPORTED
    for length, padding in ((17, 5), (7, 2)):
        arguments = request(2, length, 14, padding=padding)
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert decoding.reason == "cpu has no CUDA graphs"
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids = request(1, 17, 0)["input_ids"]
    for _ in range(2):  # a conversation, whose answers end early
        arguments = {**request(1, 1, 9), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        end = stock(model, **{**arguments, "max_new_tokens": 6})[0, -1].item()
        arguments["eos_token_id"] = end
        found, wanted = (
            generate(**arguments, past_key_values=cache)
            for generate, cache in zip((model.generate, partial(stock, model)), caches)
        )
        assert torch.equal(found, wanted) and decoding.reason == "cpu has no CUDA graphs"
        for ours, theirs in zip(*(cache.layers for cache in caches)):
            for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
                # Other sums of a prompt may round bf16 inputs of experts the other way.
                assert a.shape == b.shape and (a - b).norm() <= 1e-3 * b.norm()
            assert_same_windows(ours, theirs)
        ids = torch.cat([found, ids[:, :5]], dim=1)
    runner = decoding.runners[2]
    view = runner.cache.bucket(runner.cache.capacity)
    with HostDecisions() as decisions, torch.no_grad():
        runner._forward(runner.ids, runner.cache.mask, runner.cache.positions, view)
    # Llama 4's experts are given rows, and on a CPU look which ones are there.
    assert decisions.found == ({"aten.nonzero.default"} if family == "llama4_text" else set())


def test_a_request_that_raises_leaves_the_states_of_the_caller_s_cache() -> None:
    """Also one that held nothing before."""
    model = model_of("qwen3_next", {})
    model.ktinject_decoding.graphs = SUPPORTED

    class Interrupted:
        def put(self, _: Any) -> None:
            raise KeyboardInterrupt

    for is_begun in (False, True):
        cache = DynamicCache(config=model.config)
        arguments = {**request(1, 9, 6, padding=0), "past_key_values": cache}
        if is_begun:
            found = model.generate(**arguments)
            ids = torch.cat([found, found[:, :3]], dim=1)
            arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        layer = cache.layers[0]
        before = [
            None if tensor is None else tensor.clone()
            for tensor in (layer.conv_states[0], layer.recurrent_states[0])
        ]
        with pytest.raises(KeyboardInterrupt):
            model.generate(**arguments, streamer=Interrupted())
        assert cache.layers[0] is layer and layer.has_previous_state[0] == is_begun
        for tensor, wanted in zip((layer.conv_states[0], layer.recurrent_states[0]), before):
            assert torch.equal(tensor, wanted) if is_begun else tensor is None
        assert cache.get_seq_length() == (14 if is_begun else 0)
        del arguments["past_key_values"]
        assert torch.equal(model.generate(**arguments, past_key_values=cache), stock(model, **arguments))


@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("family, changes", ON_GPU, ids=[f"{family}{changes}" for family, changes in ON_GPU])
class TestOnAGpu:
    pytestmark = gpu

    def test_steps_are_captured(self, family: str, changes: dict[str, Any], batch: int) -> None:
        if family not in CONFIG_MAPPING:
            pytest.skip(f"this transformers has no {family}")
        model = model_of(family, changes, "cuda")
        for length in (17, 7, 250):  # the last one goes on in the next bucket
            arguments = request(batch, length, 14, "cuda")
            found, wanted = model.generate(**arguments), stock(model, **arguments)
            assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
            # Kernels of our own and other batch sizes round in another order.
            assert (found == wanted).float().mean() > 0.9
        assert sum(runner.captures for runner in model.ktinject_decoding.runners.values()) == 3


@pytest.mark.parametrize("family", [family for family in REASONS if family in AVAILABLE])
def test_families_that_stay_eager_say_why(family: str) -> None:
    model = tiny(family)
    if not model._can_compile_fullgraph:
        found = f"transformers does not say that {type(model).__name__} is free of host decisions"
    else:
        ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
        model.ktinject_decoding.graphs = SUPPORTED
        found = model.ktinject_decoding.explain(**request(1, 7, 4, padding=0)).reason
    assert found == REASONS[family]


def test_candidates_in_chunks_say_why_they_are_left_to_transformers() -> None:
    """A step of several tokens may end a chunk."""
    model = model_of("llama4_text", CHUNKS)
    decoding = model.ktinject_decoding
    decoding.graphs = SUPPORTED
    arguments = request(1, 17, 4, padding=0)
    model.generate(**arguments)
    found = several.known_support(decoding.runners[1], None)
    assert found.reason == "its attention is chunked, and the tokens of a step may be in two chunks"


class TestRings:
    @pytest.mark.parametrize("is_chunked", [False, True])
    @pytest.mark.parametrize("window, size", [(20, 256), (300, 256), (300, 512), (20, 512)])
    def test_show_the_last_tokens_of_the_window_or_chunk(
        self, window: int, size: int, is_chunked: bool
    ) -> None:
        """Keys are their positions."""
        length, padding = 240, 225
        held = DynamicCache()
        keys = torch.arange(length).double().view(1, 1, -1, 1).expand(2, 1, -1, 1)
        held.update(keys, keys, 0)
        cache = FixedCache(held, 512, 2, torch.device("cpu"), [LayerKind(window, is_chunked=is_chunked)])
        mask = torch.ones(2, length)
        mask[0, :padding] = 0
        cache.begin(held, length, mask, None)
        layer = cache.bucket(size).layers[0]
        for position in range(length, size if size == 256 else 400):
            new = torch.full((2, 1, 1, 1), float(position), dtype=torch.float64)
            found, _ = layer.update(new, new)
            shown = cache.bucket(size).masks[window]
            for row, first in ((0, padding), (1, 0)):
                seen = found[row, 0, shown[row, 0, 0], 0]
                window_begins = position + 1 - window
                if is_chunked:
                    window_begins = position - (position - first) % window
                wanted = range(max(first, window_begins), position + 1)
                assert sorted(seen.tolist()) == [*wanted]
            cache.advance()


class TestStates:
    def cache(self) -> FixedCache:
        held = DynamicCache()
        held.layers[:] = [LinearAttentionLayer()]
        held.layers[0].update_conv_state(torch.ones(1, 3, 4))
        held.layers[0].update_recurrent_state(torch.ones(1, 2, 2))
        cache = FixedCache(held, 256, 1, torch.device("cpu"))
        cache.begin(held, 5, None, None)
        return cache

    def test_that_a_step_replaces_are_brought_back(self) -> None:
        """Else a graph would go on with the state that it began with."""
        cache = self.cache()
        view, (conv, state) = cache.bucket(256), cache.layers[0]
        view.layers[0].recurrent_states[0] = torch.full((1, 2, 2), 7.0)
        view.keep_in_place()
        assert view.layers[0].recurrent_states[0] is state and bool((state == 7).all())
        assert view.layers[0].conv_states[0] is conv and bool((conv == 1).all())
        view.layers[0].recurrent_states[0] = torch.ones(1, 3, 2)
        with pytest.raises(RuntimeError):
            view.keep_in_place()

    @pytest.mark.parametrize("step", [1.0, 2.0])
    def test_a_comparison_leaves_what_the_module_left(self, step: float) -> None:
        """Both compute from the same state, and another state is as wrong as another result."""
        cache = self.cache()
        [_, state] = cache.layers[0]

        class Counting(nn.Module):
            def forward(self, x: Tensor, cache_params: Any) -> Tensor:
                return x + state.add_(1)

        def ours(x: Tensor, cache_params: Any) -> Tensor:
            return x + state.add_(step)

        found = fused.Fused(nn.Module())
        found._layer_of["a"] = 0
        found._comparing("a", Counting(), ours)(torch.ones(2), cache_params=cache.bucket(256))
        assert bool((state == 2).all()) and ("a" in found.refused) == (step != 1)


@contextmanager
def giving(model: Any, mask: Any) -> Iterator[None]:
    """Within, the model's first layer gets another mask."""
    own = type(model.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[0]
        inner = layer.forward
        vars(layer)["forward"] = lambda x, **k: inner(x, **{**k, "attention_mask": mask(k["attention_mask"])})
        try:
            return own.forward(self, *args, **kwargs)
        finally:
            vars(layer)["forward"] = inner

    model.model.__class__ = type("Odd", (own,), {"forward": forward})
    yield
    model.model.__class__ = own


def test_a_mask_that_does_not_reach_its_layer_is_refused() -> None:
    model = tiny("gpt_oss", **WINDOW)
    assert isinstance(masks.of_model(model), masks.Masks)
    with giving(model, lambda mask: mask.clone()):
        found = masks.of_model(model)
    assert not found and found.reason == "layer 0: it is given another mask than the model is"
