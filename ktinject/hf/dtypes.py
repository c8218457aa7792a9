"""Whether a model on meta has the dtypes that it was built to have.

A model's parameters have torch's default dtype of the moment in which each of them is made, but for those that its code
makes in fp32. If another thread changes that default meanwhile (building.py says when), some parameters have the other
thread's dtype, and what is loaded into them is rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ktinject.hf import building
from ktinject.model_class import own_class

_SHOWN = 3


def fault(model: PreTrainedModel) -> str:
    """What is wrong with the dtypes of a model on meta; "" if nothing is, or if nothing can be compared.

    A model whose floats are all of one dtype is of that dtype. One with several is built once more, and compared.
    """
    found = _dtypes(model)
    if len({*found.values()}) < 2:
        return ""
    asked = [model.config.dtype, *sorted({*found.values()}, key=[*found.values()].count, reverse=True)]
    first: dict[str, torch.dtype] | None = None
    for dtype in dict.fromkeys(asked):
        if not isinstance(dtype, torch.dtype) or dtype.itemsize < 2:
            continue
        try:
            with building.alone(), torch.device("meta"):
                again = own_class(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
        except Exception:  # transformers' own code: the caller built it in another way
            return ""
        want = _dtypes(again)
        wrong = {name: want[name] for name in found.keys() & want.keys() if want[name] != found[name]}
        if not wrong:
            return ""
        first = wrong if first is None else first
    return _text(found, first or {})


def _dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    state: Mapping[str, Any] = model.state_dict()
    return {name: tensor.dtype for name, tensor in state.items() if tensor.is_floating_point()}


def _text(found: Mapping[str, torch.dtype], wrong: Mapping[str, torch.dtype]) -> str:
    def name_of(dtype: torch.dtype) -> str:
        return str(dtype).removeprefix("torch.")

    shown = [
        f"{name} is {name_of(found[name])}, not {name_of(wrong[name])}" for name in sorted(wrong)[:_SHOWN]
    ]
    more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "; ".join(shown) + more
