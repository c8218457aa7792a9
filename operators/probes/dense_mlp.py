"""Whether a module is a feed-forward part of linear layers alone: rows in, each by itself through them, rows out.

    down(act(gate(x)) · up(x)), down(act(up(x))) and whatever else goes from row to row

The linear layers are replaced by functions of a row that cost nothing, so a module of any size can be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ktinject.errors import few
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.support import Support

_ROWS = 3


@dataclass(frozen=True)
class DenseMlpSpec:
    """linears: the names of its linear layers; hidden_size: of a row."""

    linears: tuple[str, ...]
    hidden_size: int


class _RowFunction(nn.Module):
    """Stands for a linear layer: a function of each row that no other row has a part in."""

    def __init__(self, linear: nn.Linear, phase: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.phase = linear.in_features, linear.out_features, phase
        self.weight = torch.empty(0, dtype=torch.float32, device="cpu")  # some ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a linear layer of {self.in_features} inputs is given {x.shape[-1]}")
        angles = torch.arange(self.out_features, dtype=x.dtype, device="cpu") + self.phase
        return torch.sin(3 * x.mean(-1, keepdim=True) + angles)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer that computes what torch's does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


@answered_once
def probe(module: nn.Module) -> DenseMlpSpec | Support:
    """What a module holds that takes rows through linear layers back to rows; it may be on the meta device."""
    linears = {name: child for name, child in module.named_children() if is_linear(child)}
    if len(linears) < 2:
        return Support.no(f"it has {len(linears)} linear layers; at least two lead there and back")
    beside = [name for name, value in module.named_parameters() if name.rpartition(".")[0] not in linears]
    if any(module.get_parameter(name).dim() > 1 for name in beside):
        return Support.no(f"beside its linear layers it holds {', '.join(few(beside))}")
    try:
        with twin.on_cpu():
            return _run(module, linears)
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return refusal_of(error, "its forward fails on rows alone")


def _run(module: nn.Module, linears: dict[str, nn.Linear]) -> DenseMlpSpec | Support:
    random = torch.Generator("cpu").manual_seed(0)
    stand_ins = {name: _RowFunction(linear, 0.7 * i) for i, (name, linear) in enumerate(linears.items())}
    small = twin.filled(module, random, stand_ins)
    hidden_size = next(iter(linears.values())).in_features
    x = torch.randn(1, _ROWS, hidden_size, generator=random, dtype=torch.float32, device="cpu")
    other = x.clone()
    other[0, 0] += 1
    found, changed = twin.run(small, x), twin.run(small, other)
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return Support.no("it gives something else than rows of the size of its input")
    if not torch.equal(found[0, 1:], changed[0, 1:]):
        return Support.no("its rows depend on each other")
    if torch.equal(found[0, 0], changed[0, 0]):
        return Support.no("its output does not depend on its input")
    return DenseMlpSpec((*linears,), hidden_size)
