"""Decode steps with few kernels: native/cuda computes norms, attention and routing of a captured step.

Between the experts of two layers, transformers runs some fifty kernels on tensors of a single token, and nearly all of
that time is launch overhead. So a twin of the model is captured instead, in which modules with a known spec
(layer_spec.py) run few kernels. The model itself does not change: prompts and other threads use it. `|` separates
kernels:

    a decoder layer   norm, query, key and value projections | attention | output projection, residual
                      | norm, router | choice of experts, submit | wait, residual
    linear attention  norm, input projections | convolution, gated delta rule, norm | output projection, residual
    Mamba-2           input projection | convolution, update of the state, norm | output projection
    a short convolution, as that
    residual streams  the streams collapsed | norm, a part of the layer | added to the mixed streams
    compressed keys   projections | a window's key; and heads turned, as attention needs them
    its parts         a norm, attention or a router, if the layer around them is not known
    before            cos and sin of the rotary embedding

These kernels are not trusted to compute what the modules compute. The first step runs both on the model's own values,
and a module keeps its own forward if the results differ, or if its kernels cannot be launched. Steps are then slower,
so that is a warning.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.distributed.process_group import ProcessGroup
from ktinject.generation import compressed, consecutive, layer_spec
from ktinject.generation.cache import KVBucket
from ktinject.generation.compressed_spec import SharedKeyAttentionSpec
from ktinject.generation.cuda.fused_steps import connect, step_of
from ktinject.generation.cuda.projections import Step
from ktinject.generation.layer_spec import DecoderLayerSpec, GatedDeltaSpec, GroupedAttentionSpec, PartSpec
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec
from ktinject.generation.streams_spec import StreamsLayerSpec
from ktinject.hf import compat
from ktinject.hf.layers import layer_configs
from ktinject.model_class import stored_parameters
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Relative errors by dtype. Sums in another order differ, and each intermediate result is rounded: a few units in the
# last place.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Relative errors of attention that transformers computes as "eager", by dtype: it rounds scores before the softmax,
# where an error becomes a factor.
_EAGER_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Relative error of a whole layer. Its parts have been compared already, so this checks only how they are connected. It
# is larger, since rounding decides between two experts with nearly equal scores, and another expert changes the result
# by more than rounding does.
_LAYER_TOLERANCE = 0.1
_MOST_ROWS = 64  # of a captured step
# Their steps take tokens of one text as rows. Other modules with states are given them one after the other.
_WITH_STATES = (GatedDeltaSpec, Mamba2Spec, ShortConvolutionSpec)


class Fused:
    """A twin of a model whose known modules run few kernels, if these agreed with the modules in the first step.

    group     the tensor-parallel process group; its ranks replace the same modules
    twin      copies of the known modules and of those around them; it shares all else with the model, which it does
              not keep alive
    refused   path → why a module with a known spec keeps its own forward
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup | None = None,
        with_states: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """with_states  as `consecutive.modules_with_states` has them; steps of several tokens of a text need them"""
        self._group = group
        self.refused: dict[str, str] = {}
        self._said: set[str] = set()  # reasons, without their numbers
        self._checked = False
        # The thread blocks of the attention kernels count here which of them are done. One buffer a device is enough:
        # requests of one model take turns.
        names = ("num_attention_heads", "linear_num_key_heads", "n_groups", "mamba_n_groups")
        heads = max((getattr(m, name, None) or 0 for m in _configs(model) for name in names), default=0)
        counts: dict[torch.device, Tensor] = {}

        def counts_for(module: nn.Module) -> Tensor:
            device = _device(module)
            if device not in counts:
                counts[device] = torch.zeros(_MOST_ROWS * heads, dtype=torch.int32, device=device)
            return counts[device]

        specs = dict(layer_spec.parts(model))
        self._layers = {path for path, spec in specs.items() if isinstance(spec, DecoderLayerSpec)}
        self._whole = {
            path for path, spec in specs.items() if isinstance(spec, StreamsLayerSpec)
        } | self._layers
        attends = GroupedAttentionSpec, SharedKeyAttentionSpec
        self._attends = {path for path, spec in specs.items() if isinstance(spec, attends)}

        def steps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Step]]:
            for path, spec in specs.items():
                module = model.get_submodule(path)
                step = step_of(spec, module, counts_for(module))
                if step is not None:
                    yield path, module, step

        alone = with_states or {}
        wanted = {module for _, module, _ in steps(model)}
        wanted |= {model.get_submodule(path) for paths in alone.values() for path in paths}
        wanted |= {*consecutive.head_of(model), *compressed.compressors_of(model)}
        self.twin = twin.tree(model, wanted.__contains__, without=("ktinject_decoding",))
        self._steps = {path: (module, step) for path, module, step in steps(self.twin)}
        connect(step for _, step in self._steps.values())
        self._with_states = {
            i: {path: self.twin.get_submodule(path) for path in paths} for i, paths in alone.items()
        }
        self._head, self._compressors = consecutive.head_of(self.twin), compressed.compressors_of(self.twin)
        self._takes_texts = {path for path, spec in specs.items() if isinstance(spec, _WITH_STATES)}
        self._layer_of = {path: _layer_index(spec) for path, spec in specs.items()}

    def __len__(self) -> int:
        return len(self._steps)

    def __call__(self, **inputs: Any) -> Any:
        """The model's output. In the first call, known modules only compare, and their own forward gives the result."""
        cache = compat.cache_of(inputs)
        checking, is_one_text = not self._checked, consecutive.is_of_one_text(cache)
        if isinstance(cache, KVBucket):
            cache.is_compared = checking
        # Modules are compared on rows of several texts, or of one token.
        steps = {} if checking and is_one_text else self._steps
        alone = {
            i: [module for path, module in held.items() if path not in steps or path not in self._takes_texts]
            for i, held in self._with_states.items()
        }
        try:
            # Set only during the call: twin and steps would hold each other and not be freed at once.
            for path, (module, step) in steps.items():
                vars(module)["forward"] = self._comparing(path, module, step) if checking else step
            one_by_one = consecutive.one_by_one(alone, cache)
            with one_by_one, consecutive.noted(self._head, cache), compressed.hiding(self._compressors):
                outputs = self.twin(**inputs)
            self._checked |= not is_one_text
            return outputs
        finally:
            for module, _ in steps.values():
                vars(module).pop("forward", None)
            for path in self.refused:
                self._steps.pop(path, None)
            self._say_what_is_refused()

    def slower(self) -> dict[str, list[str]]:
        """Reason → paths of the modules that keep their own forward for it; reasons that differ by numbers are one.

        A layer that does so only since a part of it does is not among them.
        """
        groups: dict[str, tuple[str, list[str]]] = {}
        for path, reason in self.refused.items():
            if path not in self._layers or not any(other.startswith(f"{path}.") for other in self.refused):
                groups.setdefault(_without_numbers(reason), (reason, []))[1].append(path)
        return dict(groups.values())

    def _say_what_is_refused(self) -> None:
        """Warn of each reason once."""
        for reason, paths in self.slower().items():
            if (key := _without_numbers(reason)) in self._said:
                continue
            self._said.add(key)
            more = f" and {len(paths) - 1} more modules" if len(paths) > 1 else ""
            logger.warning(
                "%s%s: captured decode steps keep transformers' kernels there, which is slower: %s",
                paths[0],
                more,
                reason,
            )

    def _comparing(self, path: str, module: nn.Module, step: Step) -> Step:
        own: Step = functools.partial(type(module).forward, module)
        if module in self._compressors:
            own = compressed.with_hidden(own)
        is_layer = path in self._layers
        attends = path in self._attends
        tolerance: dict[Any, float] = {"": _LAYER_TOLERANCE} if path in self._whole else _TOLERANCE
        if attends and _is_eager(module):
            tolerance = _EAGER_TOLERANCE

        def forward(*args: Any, **kwargs: Any) -> Any:
            states = _states(args, kwargs, self._layer_of.get(path))
            before = [state.clone() for state in states]
            theirs = theirs_of = own(*args, **kwargs)
            behind = [state.clone() for state in states]
            _put(states, before)
            part = next((p for p in self.refused if is_layer and p.startswith(f"{path}.")), None)
            if part is None:
                try:
                    ours = step(*args, **kwargs)
                    if (
                        attends
                    ):  # a step gives no weights of attention, which nobody asks for in a captured step
                        ours, theirs_of = ours[:1], theirs[:1]
                    support = _agreement(ours, theirs_of, tolerance)
                    # States in fp32 are made of values that were rounded to the model's dtype.
                    computed = *_tensors(theirs), *states
                    rounded = {"": max(tolerance.get(t.dtype, 0.0) for t in computed), **tolerance}
                    for state, wanted in zip(states, behind):
                        support = support and _agreement(state, wanted, {"": rounded[""]})
                except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                    support = Support.no(f"{type(error).__name__}: {error}")
            else:
                support = Support.no(f"{part} does")
            if self._group is not None:
                # Cut modules exchange data in their forward, so all ranks must replace the same ones.
                support = self._group.all_support(support)
            if not support:
                self.refused[path] = support.reason
            _put(states, behind)
            return theirs

        return forward


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d[\w.+-]*", "#", reason)


def _is_eager(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) == "eager"


def _layer_index(spec: PartSpec) -> int | None:
    """The index of the cache's layer that a part computes on."""
    attention = spec.attention if isinstance(spec, DecoderLayerSpec) else spec
    return getattr(attention, "layer_idx", None)


def _states(args: Sequence[Any], kwargs: Mapping[str, Any], index: int | None) -> tuple[Tensor, ...]:
    """The states of fixed size that a part changes; one that is computed twice must find them as they were."""
    cache = next((value for value in args if isinstance(value, KVBucket)), None) or compat.cache_of(kwargs)
    return cache.states_of(index) if isinstance(cache, KVBucket) and index is not None else ()


def _put(states: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for state, value in zip(states, values):
        state.copy_(value)


def _agreement(ours: Any, theirs: Any, tolerance: dict[Any, float]) -> Support:
    """Whether two outputs are equal up to rounding.

    tolerance  dtype → largest relative error; "" for every dtype
    """
    if isinstance(ours, tuple) != isinstance(theirs, tuple):
        return Support.no(f"{type(ours).__name__}, not {type(theirs).__name__}")
    ours, theirs = _tensors(ours), _tensors(theirs)
    if len(ours) != len(theirs):
        return Support.no(f"{len(ours)} outputs, not {len(theirs)}")
    for a, b in zip(ours, theirs):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return Support.no(f"an output is {list(a.shape)} {a.dtype}, not {list(b.shape)} {b.dtype}")
        if not b.dtype.is_floating_point:
            continue  # ids with equal weights may be swapped; the weights are compared anyway
        allowed = tolerance.get("", tolerance.get(b.dtype, 0.0))
        a, b = a.float(), b.float()
        # What hides keys is -inf in both.
        differs = torch.where(a == b, 0.0, a - b).norm()
        error = differs / torch.where(b.isinf(), 0.0, b).norm().clamp(min=1e-20)
        if not error <= allowed:
            return Support.no(f"relative difference {error.item():.2g}")
    return SUPPORTED


def _tensors(output: Any) -> list[Tensor]:
    return [t for t in (output if isinstance(output, tuple) else (output,)) if t is not None]


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    return [] if config is None else [config, *layer_configs(config)]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in stored_parameters(model) if p.device.type != "meta"), torch.device("cpu"))
