"""How SGLang adds the experts on the GPU and those on the CPU: its KTEPWrapperMethod, mended.

- The factor of DeepSeek-like models (routed_scaling_factor) belongs to the sum of all experts. SGLang's kernels put it
  to the GPU's part alone, and some model classes to the sum as well. Here the kernels do not scale. Where the model
  class does not, the sum is scaled after both parts are there.
- With no expert on the GPU its kernels, which may refuse empty weights, are not called.
- Without a CUDA device nothing is asked of CUDA, and kernels of the CPU see only routes that are theirs.
- A table of the experts' places is needed only where SGLang moves experts.
- Rows that pad the batch of a graph have the ids of tokens of before, and the CPU would compute them.
- Experts with a limit, another activation or weights on their input are refused: SGLang does not tell the CPU of it.

Source: sglang 0.5.11 to 0.5.23, `layers/moe/kt_ep_wrapper.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ktinject.errors import OperatorError

# Model classes that scale the sum themselves where they find a KTEPWrapperMethod: module, class, method.
_SCALING = (
    ("deepseek_v2", "DeepseekV2MoE", "forward"),
    ("glm4_moe", "Glm4MoeSparseMoeBlock", "forward_normal_dual_stream"),
    ("glm4_moe_lite", "Glm4MoeLiteSparseMoeBlock", "forward_normal_dual_stream"),
)


class _Within(threading.local):
    scaling: bool = False  # a block that scales the sum itself
    tokens: Tensor | None = (
        None  # a forward pass: how many of its rows are tokens, on the device; None: all are
    )
    live: tuple[int, Tensor] | None = (
        None  # the same as a row of bool of that length, made by the pass's first layer
    )


_within = _Within()


class Combine:
    """Takes the place of methods of SGLang's class: each gets the original first, and arguments by SGLang's names."""

    def __init__(self, module: ModuleType) -> None:
        """module: SGLang's, with the class."""
        self._module = module

    def process_weights_after_loading(self, original: Callable[..., Any], method: Any, layer: Any) -> None:
        """The GPU's weights, then ours. SGLang's own needs CUDA, and a table that some models have not."""
        if method.num_gpu_experts and hasattr(method.gpu_method, "process_weights_after_loading"):
            method.gpu_method.process_weights_after_loading(layer)
        if method.tp_rank != 0 or method.wrapper is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dispatch = _imported("eplb.expert_location_dispatch")
        found = dispatch.get_global_expert_location_metadata()
        index = method.kt_config.layer_idx
        method.wrapper.load_weights(
            None if found is None else found.physical_to_logical_map_cpu[index].contiguous()
        )

    def create_moe_runner(
        self, original: Callable[..., Any], method: Any, layer: Any, moe_runner_config: Any
    ) -> Any:
        config = moe_runner_config
        _refuse_other_experts(config)
        _watch_models()
        method.ktinject_factor = getattr(config, "routed_scaling_factor", None)
        if method.ktinject_factor is not None:
            config = dataclasses.replace(config, routed_scaling_factor=None)
        if method.num_gpu_experts == 0:
            method.moe_runner_config = config
            return None
        return original(method, layer, config)

    def apply(self, original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
        x, dispatched = dispatch_output.hidden_states, dispatch_output
        if x.is_cuda and method.num_gpu_experts:
            with _without_padding(x):
                combined = original(method, layer, dispatched)
        else:
            combined = self._alone(method, layer, dispatched)
        factor = getattr(method, "ktinject_factor", None)
        # On a CPU every model class scales.
        if factor is None or factor == 1 or _within.scaling or not x.is_cuda:
            return combined
        return combined._replace(hidden_states=combined.hidden_states * factor)

    def _alone(self, method: Any, layer: Any, dispatched: Any) -> Any:
        """Without CUDA, or without experts on the GPU."""
        dispatcher = _imported("layers.moe.token_dispatcher")
        if method.moe_runner_config.activation != "silu":
            raise NotImplementedError("experts on the CPU: only silu is served")
        x = dispatched.hidden_states
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
        is_ours = method.tp_rank == 0 and method.wrapper is not None
        if is_ours:
            with _without_padding(x):
                dispatched = self._submit(method, dispatched, stream)
        out = self._few(method, layer, dispatched) if method.num_gpu_experts else None
        if is_ours:
            part = method.wrapper.sync_forward(x, stream)
            out = part if out is None else out + part
        return dispatcher.StandardCombineInput(hidden_states=torch.zeros_like(x) if out is None else out)

    def _submit(self, method: Any, dispatched: Any, stream: int) -> Any:
        """Returns `dispatched` with the chosen experts, where SGLang has chosen them or has to."""
        x = dispatched.hidden_states
        if not hasattr(dispatched.topk_output, "topk_ids"):
            # Here, not above: it imports the operators.
            from ktinject.sglang import routers

            if routers.submit(method.wrapper._layer, x, dispatched.topk_output, stream):
                return dispatched
        dispatched = _standard(dispatched, method.kt_config.layer_idx)
        topk = dispatched.topk_output
        method.wrapper.submit_forward(x, topk.topk_ids, topk.topk_weights, stream)
        return dispatched

    def _few(self, method: Any, layer: Any, dispatched: Any) -> Tensor:
        """SGLang's experts on a CPU. Its kernels know no id of -1, so each route is a row with one expert."""
        dispatched = _standard(dispatched, method.kt_config.layer_idx)
        x, topk = dispatched.hidden_states, dispatched.topk_output
        token, slot = ((topk.topk_ids >= 0) & (topk.topk_ids < method.num_gpu_experts)).nonzero(as_tuple=True)
        out = torch.zeros_like(x, dtype=torch.float32)
        if len(token):
            routes = topk._replace(
                topk_ids=topk.topk_ids[token, slot, None], topk_weights=topk.topk_weights[token, slot, None]
            )
            rows = dispatched._replace(hidden_states=x[token], topk_output=routes)
            answer = method.gpu_method.apply(layer, rows)
            out.index_add_(0, token, answer.hidden_states.float())
        return out.to(x.dtype)


def _refuse_other_experts(config: Any) -> None:
    """SGLang hands the CPU gate · up by silu alone; what its own kernels compute besides would be left out unseen."""
    defaults = {
        "is_gated": True,
        "apply_router_weight_on_input": False,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
    }
    for name, plain in defaults.items():
        found = getattr(config, name, plain)
        if found != plain and not (plain is None and found == math.inf):
            raise OperatorError(
                f"experts on the CPU: this model's have {name} = {found}, and are served with silu(gate) · up alone. "
                "Start SGLang without --kt-weight-path."
            )


def watch_batches(model: Any) -> None:
    """Know how many rows of a pass are tokens, from the batch that SGLang gives the model."""
    original = model.forward
    if hasattr(original, "ktinject"):
        return

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get("forward_batch", args[2] if len(args) > 2 else None)
        _within.tokens, _within.live = _tokens(batch), None
        try:
            return original(*args, **kwargs)
        finally:
            _within.tokens = _within.live = None

    forward.ktinject = True  # type: ignore[attr-defined]
    model.forward = forward


def _tokens(batch: Any) -> Tensor | None:
    """How many rows of a batch are tokens. None, so that all are computed, where several ranks have attention of their
    own: the number is of one rank's rows, and the experts get those of all."""
    if any(getattr(batch, f"global_num_tokens_{where}", None) is not None for where in ("cpu", "gpu")):
        return None
    return getattr(batch, "num_token_non_padded", None)


def _without_padding(x: Tensor) -> AbstractContextManager[None]:
    """Within, submits compute only the rows that are tokens. In a graph: of each replay."""
    tokens = _within.tokens
    if tokens is None or not x.is_cuda or tokens.device != x.device or tokens.numel() != 1:
        return nullcontext()
    from ktinject.operators.offload.submits import only

    if _within.live is None or _within.live[0] != len(x):
        _within.live = len(x), torch.arange(len(x), dtype=torch.int32, device=x.device) < tokens
    return only(_within.live[1])


def _standard(dispatched: Any, layer_idx: int) -> Any:
    """With the chosen experts; SGLang may leave the choice to a kernel (see routers.py)."""
    topk = dispatched.topk_output
    if hasattr(topk, "topk_ids"):
        return dispatched
    by_layer = "layer_id" in inspect.signature(topk.to_standard).parameters
    return dispatched._replace(
        topk_output=topk.to_standard(layer_id=layer_idx) if by_layer else topk.to_standard()
    )


def _imported(name: str) -> ModuleType:
    """A module of SGLang's."""
    import importlib

    return importlib.import_module(f"sglang.srt.{name}")


def _watch_models() -> None:
    """Know when a block of a model class that scales runs. The classes are imported when their layers are made."""
    for name, kind, method in _SCALING:
        block = getattr(sys.modules.get(f"sglang.srt.models.{name}"), kind, None)
        original = vars(block).get(method) if block is not None else None
        if original is None or hasattr(original, "ktinject"):
            continue
        setattr(block, method, _scaling(original))


def _scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        before, _within.scaling = _within.scaling, True
        try:
            return original(*args, **kwargs)
        finally:
            _within.scaling = before

    replaced.ktinject = True  # type: ignore[attr-defined]
    return replaced
