"""Requests that return more than tokens, or a cache, beside those of unswapped transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import models
import torch
from test_generate import swapped
from test_native_decoder import SURE, SURE_GROUPS, TOLERANCE, difference, doubled, sure, varied
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

import ktinject
from ktinject.support import SUPPORTED


@dataclass(frozen=True)
class Pair:
    """A swapped model and the same one, unswapped.

    last  what `ktinject_decoding.last` says of a request in recorded steps, or as near as a CPU comes to it
    """

    model: PreTrainedModel
    plain: PreTrainedModel
    last: str

    def generate(self, **arguments: Any) -> tuple[Any, Any]:
        """What both answer, from the same random numbers."""
        torch.manual_seed(3)
        ours = self.model.generate(**arguments)
        torch.manual_seed(3)
        return ours, self.plain.generate(**arguments)


def pair(family: str, way: str, **config: Any) -> Pair:
    """In fp32, where roundings decide no token.

    way  "eager": steps as transformers makes them; "fixed": on a graph's tensors; "graph": on a GPU
    """
    device = "cuda" if way == "graph" else "cpu"
    plain = models.tiny(family, **config)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(4)
    model = swapped(family, device=device, **config)
    if way == "fixed":
        model.ktinject_decoding.graphs = SUPPORTED
    return Pair(model, plain.to(device), "graph loop" if way == "graph" else "eager loop")


def native_pair(family: str) -> Pair:
    """In bf16: the tokens may part, see `read`."""
    config = SURE_GROUPS if family == "deepseek_v3" else SURE
    return Pair(sure(family), doubled(models.tiny(family, **config).bfloat16()), "native loop")


def made(
    family: str, weights: str = "bf16", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model whose decode steps are native, and the same before in fp32.

    weights  of experts, dense layers and the output layer
    dtype    of the swapped model; both have values that bf16 holds
    changes  of the family's tiny config
    """
    model, truth = (varied(doubled(models.tiny(family, **changes).bfloat16())).to(dtype) for _ in range(2))
    for one in (model, truth):
        generator = torch.Generator().manual_seed(9)
        for name, parameter in one.named_parameters():
            if name.endswith("sinks"):
                parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    return ktinject.optimize(
        model, "auto", devices=["cpu"], variables=variables, progress=False
    ), truth.float()


def read(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
    """What a model makes of a text that is given: logits [b, n, v], and the cache.

    mask  [b, ≤ n] of its beginning, 0 for padding
    """
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return out.logits, cache


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """The same dtype, shape, device and places of -inf; values differ from their row by little of its norm."""
    assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
    # A graph attends over a whole bucket, and sums in another order.
    most = 1e-3 if ours.is_cuda else 1e-4
    norm = theirs.nan_to_num(neginf=0).norm(dim=-1, keepdim=True).clamp(min=1e-9)
    odd = ours.isinf() != theirs.isinf()
    if ours.is_cuda:  # which of two nearly equal tokens is the last one of the best may then change, too
        last = torch.maximum(
            *(t.masked_fill(t.isinf(), torch.inf).amin(-1, keepdim=True) for t in (ours, theirs))
        )
        odd &= torch.maximum(ours, theirs) > last + most * norm
    assert not odd.any()
    both = ~(ours.isinf() | theirs.isinf())  # not NaN, which shows below
    error = torch.where(both, ours - theirs, 0).norm(dim=-1, keepdim=True) / norm
    assert (error <= most).all(), f"{error.max():.2g}"


def assert_same_cache(ours: Any, theirs: DynamicCache) -> None:
    assert type(ours) is DynamicCache and len(ours.layers) == len(theirs.layers)
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers):
        assert type(mine) is type(other)
        assert mine.is_initialized == other.is_initialized
        if other.is_initialized:
            assert_close(mine.keys, other.keys)
            assert_close(mine.values, other.values)


def assert_near_cache(ours: Any, theirs: DynamicCache) -> None:
    """As near as native steps in bf16 are."""
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, other in zip(ours.layers, theirs.layers):
        assert (mine.keys.dtype, mine.keys.shape) == (other.keys.dtype, other.keys.shape)
        assert difference(mine.keys, other.keys) <= TOLERANCE
        assert difference(mine.values, other.values) <= TOLERANCE


def assert_same_output(ours: Any, theirs: GenerateDecoderOnlyOutput) -> None:
    assert type(ours) is GenerateDecoderOnlyOutput
    assert list(ours.keys()) == list(theirs.keys())
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        if wanted is None:
            assert found is None
            continue
        assert isinstance(found, tuple) and len(found) == len(wanted)
        for mine, other in zip(found, wanted):
            assert_close(mine, other)
    if theirs.past_key_values is None:
        assert ours.past_key_values is None
    else:
        assert_same_cache(ours.past_key_values, theirs.past_key_values)
