"""What a Mixture-of-Experts block does with the output of its routed experts, found out by running it.

A block has a router, the routed-experts leaf and perhaps shared experts. Deferral takes part of the leaf's sum away
and adds it one MoE layer later, past whatever the block does next. That is the same sum only if the block passes the
leaf's output on unchanged, row by row, and at most adds to it. So `describe` runs the block's own `forward` on a copy
with random weights, hands it an output of its own choosing in place of the leaf's, and looks at what comes out. A
block with a norm, a projection or a factor behind its experts is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktinject.operators.probes import experts

# fp32 in, fp32 out, one addition: what is left is the rounding of that addition.
_TOLERANCE = 1e-5
_BATCH = 3


@dataclass(frozen=True)
class BlockSpec:
    """leaf: the child that computes the routed experts; top_k: a token's; adds: whether the block adds to them."""

    leaf: str
    top_k: int
    adds: bool


class _Probe(nn.Module):
    """Stands for the leaf: records how it is called and answers with `answer` [m, hidden]."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(leaf).items() if isinstance(v, (int, float, str))}
        self.__dict__.update(plain)
        self.answer = torch.empty(0)
        self.calls: list[tuple[tuple[int, ...], ...]] = []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.calls.append((tuple(hidden_states.shape), tuple(top_k_index.shape), tuple(top_k_weights.shape)))
        return self.answer.clone()


# Layers of one model are alike, and the shared experts of a large one take a tenth of a second to fill.
_known: dict[Any, BlockSpec | str] = {}


def describe(block: nn.Module) -> BlockSpec | str:
    """Describe a block, which may be on the meta device; a str is the reason why its experts cannot be deferred."""
    key = _key(block)
    if key not in _known:
        if len(_known) >= 64:
            _known.clear()
        _known[key] = _describe(block)
    return _known[key]


def _key(block: nn.Module) -> tuple[Any, ...]:
    """All that the answer can depend on: classes, shapes, and plain attributes, also of a config."""
    modules = [(name, type(module), *_plain(module)) for name, module in block.named_modules()]
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return (*modules, *((name, tensor.shape, tensor.dtype) for name, tensor in tensors))


def _plain(holder: object) -> Iterator[tuple[str, Any]]:
    for name, value in vars(holder).items():
        if isinstance(value, PreTrainedConfig):
            yield name, tuple(_plain(value))
        elif isinstance(value, (int, float, str)):
            yield name, value


def _describe(block: nn.Module) -> BlockSpec | str:
    leaves = {
        name: spec
        for name, child in block.named_children()
        if isinstance(spec := experts.describe(child), experts.ExpertsSpec)
    }
    if len(leaves) != 1:
        found = ", ".join(leaves) or "none"
        return f"a Mixture-of-Experts block has one child that computes routed experts; found: {found}"
    ((leaf, spec),) = leaves.items()
    try:
        with torch.no_grad(), torch.device("cpu"):
            return _probe(block, leaf, spec.hidden_size)
    except Exception as error:  # the block's own code runs here, so anything may come out of it
        return f"its forward fails on a copy with one token a row: {type(error).__name__}: {error}"


def twin_of(block: nn.Module, **children: nn.Module) -> Any:
    """A second block with the same class, attributes and tensors, in which some children are exchanged.

    It shares all parameters, buffers and other children with `block`, which stays as it is; it has no hooks.
    """
    twin = copy.copy(block)
    vars(twin)["_modules"] = {**block._modules, **children}
    for name in ("_parameters", "_buffers"):
        vars(twin)[name] = dict(vars(block)[name])
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(twin)[name] = OrderedDict()
    return twin


def run(twin: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on a twin; a forward set on the instance would be bound to the block it came from."""
    return type(twin).forward(twin, *args, **kwargs)


def _probe(block: nn.Module, leaf: str, hidden_size: int) -> BlockSpec | str:
    random = torch.Generator("cpu").manual_seed(0)
    probe = _Probe(block.get_submodule(leaf))
    twin = twin_of(block, **{name: _filled(child, random) for name, child in block.named_children()})
    twin._modules[leaf] = probe
    _fill(twin, random)
    x = torch.randn(_BATCH, 1, hidden_size, generator=random)

    def answer(value: Tensor) -> Tensor:
        probe.answer = value
        out = run(twin, x)
        return out[0] if isinstance(out, tuple) else out

    delta = torch.randn(_BATCH, hidden_size, generator=random)
    alone, together = answer(torch.zeros_like(delta)), answer(delta)
    if len(probe.calls) != 2:
        return f"it calls its experts {len(probe.calls) // 2} times for one input"
    rows, index, weights = probe.calls[0]
    if rows != (_BATCH, hidden_size) or len(index) != 2 or index[0] != _BATCH or weights != index:
        return (
            f"it calls its experts with shapes {[*rows]}, {[*index]}, {[*weights]}; "
            f"expected [{_BATCH}, {hidden_size}], [{_BATCH}, top_k], [{_BATCH}, top_k]"
        )
    if together.numel() != delta.numel():
        return f"its output has shape {list(together.shape)}, that of its experts {list(delta.shape)}"
    difference = ((together - alone).reshape(delta.shape) - delta).abs().max().item()
    if not difference <= _TOLERANCE * (1 + alone.abs().max().item()):
        return f"it does more with its experts' output than add to it: max difference {difference:.1e}"
    return BlockSpec(leaf=leaf, top_k=index[1], adds=bool(alone.count_nonzero()))


def _filled(module: nn.Module, random: torch.Generator) -> nn.Module:
    """A copy on the CPU with random weights."""
    children = {name: _filled(child, random) for name, child in module.named_children()}
    twin: nn.Module = twin_of(module, **children)
    _fill(twin, random)
    return twin


def _fill(twin: nn.Module, random: torch.Generator) -> None:
    # A repeated pattern, since a shared expert of a large model would take a second to draw.
    pattern = torch.rand(4099, generator=random) - 0.5
    kinds: list[dict[str, Any]] = [twin._parameters, twin._buffers]
    for tensors in kinds:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not tensor.is_floating_point():
                tensors[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
                continue
            small = pattern / max(1, tensor.shape[-1] if tensor.dim() > 1 else 1) ** 0.5
            value = small.repeat(tensor.numel() // len(small) + 1)[: tensor.numel()].view(tensor.shape)
            tensors[name] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    twin.eval()
