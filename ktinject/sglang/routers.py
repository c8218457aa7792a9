"""How SGLang's blocks choose experts, by the names that they have in its model files: what guesses and submits need.

A block has `gate` or `router` and `topk` beside its `experts`; the layer around it has the norm before, by one of
several names. What is not known is said by a reason, and such layers run as SGLang has them.

SGLang can leave the choice to the experts' kernels: TopK then gives them the router's logits. A submit on a GPU chooses
while it copies the tokens, so one kernel less lies between two layers. What SGLang does with the chosen experts
besides, it does with those of the submit: it records them where it was asked to.

Source: sglang 0.5.11 to 0.5.23; the choice is left where `topk.py` has what 0.5.17 has.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject.addresses import CODES
from ktinject.generation.cuda import decode_ops
from ktinject.operators.offload.submits import MOST_TOKENS
from ktinject.sglang.layer import Layer
from ktinject.sglang.wrapper import KTMoEWrapper

log = logging.getLogger("ktinject")

# SGLang's norms, and what is added to the weight of each.
_OFFSETS = {"RMSNorm": 0.0, "GemmaRMSNorm": 1.0}
_GATES = "gate", "router"
# The first that there is: where a layer also has a norm behind its attention, that is not the one before the experts.
_NORMS = "pre_mlp_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm"
# Each is greater for a greater logit.
_BY_LOGITS = "softmax", "sigmoid", "sqrtsoftplus"
_MOST_EXPERTS = 256  # of a submit that chooses; a multiple of 32 of them are chosen from by a warp


class Router(NamedTuple):
    """How a layer chooses its experts: those with the greatest logits.

    norm   [hidden] float32, the weight of the norm before it
    gate   [experts, hidden]
    top_k  experts of a token
    """

    norm: Tensor
    gate: Tensor
    top_k: int


def layers_of(model: nn.Module) -> list[tuple[Layer, str]]:
    """The layers of a model with experts on the CPU, in their order, each with the path of its experts."""
    found = []
    for path, part in model.named_modules():
        made = getattr(getattr(part, "quant_method", None), "wrapper", None)
        if isinstance(made, KTMoEWrapper):
            found.append((made._layer, path))
    return sorted(found, key=lambda one: one[0].given.layer_idx)


def kind_of(model: nn.Module, path: str) -> str:
    """The class of the block around the experts at this path."""
    return type(_block(model, path)).__name__


def spans(numbers: list[int]) -> str:
    """1, 2, 3, 7 as \"1 to 3, 7\"."""
    said: list[list[int]] = []
    for number in sorted(numbers):
        if said and number == said[-1][1] + 1:
            said[-1][1] = number
        else:
            said.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in said)


def find(model: nn.Module, path: str, layer: Layer) -> Router | str:
    """That of the experts at this path, or why it is not known to choose as `decode_ops.route` does."""
    block, around = _block(model, path), model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    gate_name, gate = _first(block, _GATES)
    norm_name, before = _first(around, _NORMS)
    chosen = getattr(getattr(block, "topk", None), "topk_config", None)
    if gate is None or chosen is None:
        return f"it has no {' or '.join(_GATES) if gate is None else 'topk.topk_config'}"
    if before is None:
        return f"the layer has none of the norms {', '.join(_NORMS)}"
    offset, norm = _OFFSETS.get(type(before).__name__), getattr(before, "weight", None)
    weight, experts, hidden = getattr(gate, "weight", None), layer.given.num_experts, layer.given.hidden_size
    if offset is None or not isinstance(norm, Tensor) or list(norm.shape) != [hidden]:
        return (
            f"{norm_name} is a {type(before).__name__}; known are {' and '.join(_OFFSETS)} of {hidden} values"
        )
    if (
        not isinstance(weight, Tensor)
        or list(weight.shape) != [experts, hidden]
        or not weight.is_contiguous()
    ):
        return f"{gate_name} has no weight [{experts}, {hidden}]"
    if weight.dtype not in (torch.bfloat16, torch.float16) or hidden % 32:
        return f"{gate_name} is {weight.dtype} of {hidden} values; known are bfloat16 and float16 of a multiple of 32"
    if why := _another_choice(gate, chosen):
        return why
    if not decode_ops.routes(experts, chosen.top_k):
        return f"{chosen.top_k} of {experts} experts are more than a warp chooses"
    return Router(norm.detach().float() + offset, weight.detach(), chosen.top_k)


def _block(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.rpartition(".")[0])


def _first(holder: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    """Of these attributes, the first one that there is, and its name."""
    return next(
        ((name, there) for name in names if (there := getattr(holder, name, None)) is not None), ("", None)
    )


def _another_choice(gate: Any, chosen: Any) -> str:
    """Why the experts with the greatest logits are not those that are chosen. Empty: they are."""
    scoring = getattr(chosen, "scoring_func", "softmax")
    if scoring not in _BY_LOGITS:
        return f"it chooses by {scoring}; known are {', '.join(_BY_LOGITS)}"
    if getattr(chosen, "custom_routing_function", None):
        return "it chooses by a function of its own"
    groups, kept = (getattr(chosen, name, None) for name in ("num_expert_group", "topk_group"))
    if getattr(chosen, "use_grouped_topk", False) and (groups is None or groups != kept):
        return f"it chooses among the experts of {kept} of {groups} groups"
    if getattr(chosen, "num_fused_shared_experts", 0):
        return "shared experts are among its experts"
    biases = ("correction_bias", chosen), ("bias", gate), ("e_score_correction_bias", gate)
    found = next((name for name, holder in biases if getattr(holder, name, None) is not None), None)
    return f"it chooses with {found}" if found else ""


# --- the choice is left to a submit ---


def leave_choices(model: nn.Module) -> None:
    """Of a loaded model, leave the choice of experts to submits where SGLang and the block allow it; the log says once
    of which layers, and why not of others."""
    said: dict[str, list[int]] = {}
    for layer, path in layers_of(model):
        if not layer.is_on_gpu:
            continue
        why, of = leave_choice(model, path, layer), kind_of(model, path)
        told = f"chosen by SGLang: {of}: {why}" if why else f"chosen by the submit: {of}"
        said.setdefault(told, []).append(layer.given.layer_idx)
    for told, at in said.items():
        log.info("experts of layers %s are %s", spans(at), told)


def leave_choice(model: nn.Module, path: str, layer: Layer) -> str:
    """Let SGLang's TopK of the experts at this path hand on the logits. Returns why it does not; empty: it does."""
    block = _block(model, path)
    topk, experts = getattr(block, "topk", None), getattr(block, "experts", None)
    chosen, made = getattr(topk, "topk_config", None), sys.modules.get(type(topk).__module__)
    if chosen is None or made is None or not _has_names(made):
        return "this SGLang has no such choice"
    if getattr(chosen, "output_format", 0) is not None:
        return "" if layer.chooses else "another format of the choice is asked for"
    if type(getattr(experts, "dispatcher", None)).__name__ != "StandardDispatcher":
        return "tokens are dispatched between processes"
    if (scoring := getattr(chosen, "scoring_func", "an unknown function")) != "softmax":
        return f"it chooses by {scoring}"
    if why := _another_choice(None, chosen):
        return why
    if getattr(chosen, "use_grouped_topk", False):
        return "it chooses among groups"
    given = layer.given
    if (
        not layer.is_whole
        or given.deferred
        or given.num_experts > _MOST_EXPERTS
        or chosen.top_k > given.top_k
    ):
        return "the CPU has not all experts in their order, or defers some, or there are too many"
    if not decode_ops.routes(given.num_experts, chosen.top_k):
        return "too many experts of a token"
    chosen.output_format, layer.chooses = made.TopKOutputFormat.BYPASSED, True
    return ""


def _has_names(made: Any) -> bool:
    """Whether SGLang's topk.py has what is relied on here."""
    formats: Any = getattr(made, "TopKOutputFormat", None)
    bypassed: Any = getattr(made, "BypassedTopKOutput", None)
    names = "precomputed_topk_postprocess_is_noop", "build_precomputed_topk_output"
    return (
        hasattr(formats, "BYPASSED")
        and {"router_logits", "topk_config", "num_token_non_padded", "expert_location_dispatch_info"}
        <= {*getattr(bypassed, "_fields", ())}
        and "layer_id" in inspect.signature(bypassed.to_standard).parameters
        and all(callable(getattr(made, name, None)) for name in names)
    )


def submit(layer: Layer, x: Tensor, topk: Any, stream: int) -> bool:
    """Submit tokens [m, hidden] whose experts SGLang has left to be chosen. False: it has to choose them first."""
    logits, made = getattr(topk, "router_logits", None), sys.modules[type(topk).__module__]
    if (
        not layer.chooses  # others may have asked SGLang to leave a choice that is none by softmax
        or not isinstance(logits, Tensor)
        or not x.is_cuda
        or not 0 < len(x) <= MOST_TOKENS
        or logits.device != x.device
        or logits.dtype not in CODES
        or tuple(logits.shape) != (len(x), layer.given.num_experts)
        or not layer.is_whole
        or not made.precomputed_topk_postprocess_is_noop(
            topk.topk_config, topk.num_token_non_padded, topk.expert_location_dispatch_info
        )
    ):
        return False
    chosen = topk.topk_config
    ids, weights = layer.submit_logits(x, logits.contiguous(), chosen.top_k, bool(chosen.renormalize), stream)
    made.build_precomputed_topk_output(weights, ids, chosen, layer.given.layer_idx)
    return True
