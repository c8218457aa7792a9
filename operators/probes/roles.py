"""Which role a module has in its model: what the rules' `role` and `inside` ask for.

A role is decided by a probe wherever there is one, so rules by roles serve a family that nobody has heard of. Where a
module stands narrows down what is tried: a router stands beside routed experts. Only of attention nothing is run: it is
what takes the cache of keys, values or states. Modules outside of the language model, such as a tower for images, have
no role.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from ktinject.errors import OperatorError
from ktinject.hf import compat
from ktinject.hf.layers import Layers
from ktinject.operators.probes import attention, dense_mlp, experts, moe_block, norm, router
from ktinject.operators.probes.answer import PassingRefusal
from ktinject.rules import ELSEWHERE, ROLES
from ktinject.support import SUPPORTED, Support

_CACHES = {*compat.CACHE_NAMES, "past_key_value"}


class Roles:
    """The roles of a model's modules, each found when it is asked for. The model may be on the meta device."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = Layers(model)
        self._modules = dict(model.named_modules())
        self._found: dict[tuple[str, str], Support] = {}

    def has(self, path: str, role: str) -> Support:
        """Whether the module at a path has a role; if not, ELSEWHERE or what keeps it from having it.

        Raises   OperatorError where a failure that may pass, such as too little memory, keeps it from being found out
        """
        key = path, role
        if key not in self._found:
            find: Callable[[str, nn.Module], Support] = getattr(self, f"_{role}")
            found = find(path, self._modules[path])
            if isinstance(found, PassingRefusal):  # a rule must not leave a module out for that
                raise OperatorError(
                    f"{path}: whether it is {role} cannot be found out: {found.reason}. Try again."
                )
            self._found[key] = found
        return self._found[key]

    def of(self, path: str) -> tuple[str, ...]:
        """All roles of a module."""
        return tuple(role for role in ROLES if self.has(path, role))

    def _is_inside(self, path: str) -> bool:
        """Whether a module belongs to the language model, but for its output layer."""
        outer = self._layers.decoder_path
        return not outer or path.startswith(f"{outer}.")

    @cached_property
    def _holders(self) -> dict[str, int | None]:
        """Path of a module with routed experts among its children → how many there are, if that can be told."""
        return {
            path.rpartition(".")[0]: _count(module)
            for path, module in self._modules.items()
            if self.has(path, "routed_experts")
        }

    def _routed_experts(self, path: str, module: nn.Module) -> Support:
        is_named = path.rpartition(".")[2] == "experts"
        is_stack = "down_proj" in module._parameters
        if not (is_named or is_stack) or not self._is_inside(path):
            return ELSEWHERE
        found = experts.probe(module)
        if not isinstance(found, Support) or isinstance(found, PassingRefusal):
            return _answer(found)
        return Support(is_named and any(True for _ in module.parameters()), found.reason)

    def _shared_experts(self, path: str, module: nn.Module) -> Support:
        return self.has(path, "dense_mlp") if path.rpartition(".")[0] in self._holders else ELSEWHERE

    def _router(self, path: str, module: nn.Module) -> Support:
        holder = path.rpartition(".")[0]
        if holder not in self._holders or self.has(path, "routed_experts"):
            return ELSEWHERE
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return ELSEWHERE
        count = self._holders[holder]
        if count is not None and weight.shape[0] != count:
            return Support.no(f"its weight has {weight.shape[0]} rows, and there are {count} experts")
        return _answer(router.probe(module))

    def _moe_block(self, path: str, module: nn.Module) -> Support:
        return _answer(moe_block.probe(module)) if path in self._holders else ELSEWHERE

    def _attention(self, path: str, module: nn.Module) -> Support:
        if self._layers.of(path) is None or path in self._layers.paths:
            return ELSEWHERE
        taken = inspect.signature(type(module).forward).parameters
        return SUPPORTED if _CACHES & taken.keys() else ELSEWHERE

    def _latent_attention(self, path: str, module: nn.Module) -> Support:
        stands = attention.EXPANSION in module._modules and self._is_inside(path)
        return _answer(attention.probe(module)) if stands else ELSEWHERE

    def _linear(self, path: str, module: nn.Module) -> Support:
        if not isinstance(module, nn.Linear) or not (self._is_inside(path) or self.has(path, "output_layer")):
            return ELSEWHERE
        return SUPPORTED if dense_mlp.is_linear(module) else Support.no("it has a forward of its own")

    def _dense_mlp(self, path: str, module: nn.Module) -> Support:
        stands = self._layers.of(path) is not None and any(map(dense_mlp.is_linear, module.children()))
        return _answer(dense_mlp.probe(module)) if stands else ELSEWHERE

    def _norm(self, path: str, module: nn.Module) -> Support:
        is_vector = [parameter.dim() for parameter in module.parameters()] == [1]
        if not is_vector or "weight" not in module._parameters or not self._is_inside(path):
            return ELSEWHERE
        return _answer(norm.probe_of_one_input(module))

    def _output_layer(self, path: str, module: nn.Module) -> Support:
        return SUPPORTED if module is self._model.get_output_embeddings() else ELSEWHERE

    def _embedding(self, path: str, module: nn.Module) -> Support:
        return SUPPORTED if module is self._model.get_input_embeddings() else ELSEWHERE


def _answer(found: object) -> Support:
    return found if isinstance(found, Support) else SUPPORTED


def _count(module: nn.Module) -> int | None:
    """How many routed experts a module holds; None: its parameters do not tell."""
    found = experts.probe(module)
    return None if isinstance(found, Support) else found.num_experts
