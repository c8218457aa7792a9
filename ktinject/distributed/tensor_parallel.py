"""Tensor parallelism: each rank holds a part of the linear layers that transformers' `tp_plan` names.

    style                  weight of a rank   before the layer             after the layer
    colwise                [n / size, k]      –                            the rank keeps its part of the outputs
    rowwise                [n, k / size]      –                            sum over all ranks
    colwise_gather_output  [n / size, k]      –                            the outputs of all ranks are concatenated
    rowwise_split_input    [n, k / size]      takes its part of the input  sum over all ranks

The whole weight is [n, k]. A cut layer is an `nn.Linear` of its part's size, so the planner, the operators and
transformers' loader just see a smaller layer. All other modules are whole in every rank, with the same
inputs and the same outputs everywhere. So it is always correct to leave a layer uncut, as long as a colwise layer and
the rowwise layers that take its outputs are treated alike. Layers within a module that an operator replaces are left
uncut, and so are modules other than linear layers.

transformers' own implementation (DTensors, wrapped forwards) would not reach the operators, and it changed between 5.17
and 5.23. The format of `tp_plan` did not change, so it is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError, PlanError
from ktinject.hf.key_map import KeyMap
from ktinject.hf.layers import layer_configs

Style = Literal["colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"]

_STYLES: dict[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
}
# Styles that change nothing in a forward pass; some of them act on gradients.
_NOTHING = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank holds: `length` indices of dimension `dim` from `start` on.

    Length 0 means that the rank holds no part; it uses zeros of the whole shape.
    """

    dim: int
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of the part. A view would keep the whole tensor in memory."""
        if self.length == 0:
            return torch.zeros_like(tensor)
        return tensor.narrow(self.dim, self.start, self.length).clone(memory_format=torch.contiguous_format)


def choose(model: PreTrainedModel, size: int, taken: Collection[str]) -> dict[str, Style]:
    """Choose the layers to cut.

    model    not swapped
    size     number of ranks
    taken    paths of modules that operators replace as a whole
    Returns  path of a linear layer → style
    Raises   PlanError if transformers' plan names no layer that can be cut, or the layers' sizes cannot be divided
    """
    plan = model.tp_plan
    modules = dict(model.named_modules())
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    whole = set(taken)
    found: dict[str, Style] = {}
    for path, module in modules.items():
        style = plan.get(_LAYER_NUMBER.sub(".*", path))
        if style is None or style in _NOTHING:
            continue
        if type(module) is nn.Linear and style in _STYLES:
            found[path] = _STYLES[style]
        elif not isinstance(module, nn.Embedding):
            whole.add(path if "." not in path else path.rpartition(".")[0] if _is_linear(module) else path)
    for name, _ in model.named_parameters():
        if plan.get(_LAYER_NUMBER.sub(".*", name)) not in (None, *_NOTHING):
            whole.add(name.rpartition(".")[0])
    found = {path: style for path, style in found.items() if not _is_within(path, whole)}
    found = {path: style for path, style in found.items() if f"{path}.weight" not in tied}
    found = {path: style for path, style in found.items() if _hangs_together(path, found)}
    if not found:
        raise PlanError(
            f"tp: transformers' tp_plan of {type(model).__name__} names no linear layer that can be cut. "
            "Leave tp out; layers can stand on several GPUs of one process."
        )
    units = {path: _units(model, modules, path, style) for path, style in found.items()}
    for path in [path for path, style in found.items() if style == "colwise_gather_output"]:
        if units[path] % size:
            del found[path], units[path]  # no other layer depends on how this one is cut, so it stays whole
    unfit = {path: count for path, count in units.items() if count % size}
    if unfit:
        most = min(unit for path, unit in units.items() if path in found)
        fitting = [n for n in range(1, most + 1) if all(count % n == 0 for count in units.values())]
        path, count = next(iter(unfit.items()))
        raise PlanError(
            f"tp: {size} processes cannot share {path}, which has {count} {_unit(path)}, and {len(unfit) - 1} more "
            f"layers; allowed are {', '.join(map(str, fitting))} processes. Start so many."
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    return hasattr(module, "in_features")


def _is_within(path: str, whole: Collection[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in whole if other)


def _hangs_together(path: str, found: Mapping[str, Style]) -> bool:
    """Whether a colwise layer has a rowwise layer beside it in the same module, and a rowwise layer a colwise one.

    The outputs of the one are the inputs of the other, so neither can be cut alone. The other styles need no partner.
    """
    parent = path.rpartition(".")[0]
    partner = {"colwise": "rowwise", "rowwise": "colwise"}.get(found[path])
    return partner is None or any(
        style == partner and other.rpartition(".")[0] == parent for other, style in found.items()
    )


def _is_attention(path: str) -> bool:
    return bool(re.search(r"attn|attention", path.rpartition(".")[0].rpartition(".")[2]))


def _unit(path: str) -> str:
    return "heads" if _is_attention(path) else "features"


def _units(model: PreTrainedModel, modules: Mapping[str, nn.Module], path: str, style: Style) -> int:
    """The number of units that a layer can be divided into: attention heads, or features of any other layer."""
    module: Any = modules[path]
    features = module.out_features if style.startswith("colwise") else module.in_features
    if not _is_attention(path) or style == "colwise_gather_output":
        return int(features)
    heads = math.gcd(*(config.num_attention_heads for config in layer_configs(model.config)))
    size = getattr(modules[path.rpartition(".")[0]], "head_dim", None)
    if path.endswith(("k_proj", "v_proj")) and isinstance(size, int) and features % size == 0:
        return int(features // size)
    return int(heads)


@contextmanager
def applied(model: nn.Module, styles: Mapping[str, Style], size: int) -> Iterator[None]:
    """Inside the `with` block, the layers have the sizes of one rank's parts; afterwards their own again."""
    saved = [
        (module := model.get_submodule(path), dict(module._parameters), vars(module).copy())
        for path in styles
    ]
    try:
        apply(model, styles, size)
        yield
    finally:
        for module, parameters, attributes in saved:
            module.in_features, module.out_features = attributes["in_features"], attributes["out_features"]
            module._parameters.update(parameters)


def apply(model: nn.Module, styles: Mapping[str, Style], size: int) -> None:
    """Shrink the layers, which are on the meta device, to the sizes of one rank's parts.

    styles  path → style, as `choose` returns it
    size    number of ranks
    """
    for path, style in styles.items():
        module: Any = model.get_submodule(path)
        if style.startswith("colwise"):
            module.out_features //= size
        else:
            module.in_features //= size
        shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
        for name, parameter in module._parameters.items():
            if parameter is not None:
                part = torch.empty(shapes[name], dtype=parameter.dtype, device="meta")
                module._parameters[name] = nn.Parameter(part, requires_grad=False)


def key_cuts(
    model: nn.Module, styles: Mapping[str, Style], mapping: KeyMap, group: ProcessGroup
) -> dict[str, Cut]:
    """The part of each checkpoint tensor that this rank reads.

    model    its layers have the sizes of their parts (`applied`)
    Returns  checkpoint key → part, for the tensors of cut layers only
    Raises   PlanError for a layer that the checkpoint stores together with other layers
    """
    cuts: dict[str, Cut] = {}
    for path, style in styles.items():
        module: Any = model.get_submodule(path)
        by_output = style.startswith("colwise")
        length = module.out_features if by_output else module.in_features
        for name, parameter in module._parameters.items():
            if parameter is None or (name == "bias" and not by_output and group.rank == 0):
                continue  # rank 0 adds the whole bias of a rowwise layer; the other ranks add zeros, see below
            pieces = mapping.targets.get(f"{path}.{name}", ())
            if len(pieces) != 1 or pieces[0].part is not None:
                raise PlanError(
                    f"tp: the checkpoint stores {path}.{name} together with other weights, which is not cut. "
                    "Leave tp out, or save the checkpoint once with transformers' save_pretrained."
                )
            if name == "bias" and not by_output:
                cuts[pieces[0].key] = Cut(0, 0, 0)
            else:
                cuts[pieces[0].key] = Cut(0 if by_output else 1, group.rank * length, length)
    return cuts


def cached_values(
    whole: Sequence[int],
    layer_of: Callable[[str], int | None],
    styles: Mapping[str, Style],
    group: ProcessGroup | None,
) -> Sequence[int]:
    """The values that one rank's KV cache holds for a token, layer by layer.

    whole     the same for the uncut model
    layer_of  module path → number of its decoder layer, None outside of the layers
    """
    if group is None:
        return whole
    cut = {layer_of(path) for path, style in styles.items() if style == "colwise" and _is_attention(path)}
    return [count // group.size if number in cut else count for number, count in enumerate(whole)]


class _Hook:
    """A forward hook or pre-hook of a cut layer. It only enqueues work, so a CUDA graph may capture it."""

    capturable = True

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group


class _Sum(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            raise OperatorError(
                "tp: gradients do not pass between processes. Call the model within torch.no_grad(), or load it "
                "without tp to train."
            )
        return self._group.all_reduce(output.contiguous())


class _Join(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self._group.gather_last(output)


class _Split(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].chunk(self._group.size, -1)[self._group.rank].contiguous(), *args[1:])


class _End(_Hook):
    """A hook after the whole model. All ranks get the same logits, and all raise an error that one rank has met.

    share   rank 0's logits are broadcast; not needed if the logits have been gathered from all ranks
    """

    def __init__(self, group: ProcessGroup, share: bool) -> None:
        super().__init__(group)
        self._share = share

    def __call__(self, model: nn.Module, args: Any, output: Any) -> Any:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            return None
        if self._share:
            # Each rank has computed these logits itself. They should be equal bit by bit, but the chosen tokens must
            # be, so nothing is left to chance.
            output.logits = logits = self._group.broadcast(logits.contiguous())
        if not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._group.raise_if_failed(logits)
        return output


def install(model: PreTrainedModel, styles: Mapping[str, Style], group: ProcessGroup) -> None:
    """Register the hooks by which the cut layers of a loaded model exchange inputs and outputs; freezes its parameters.

    styles  path → style, as `choose` returns it
    """
    model.requires_grad_(False)
    for path, style in styles.items():
        module = model.get_submodule(path)
        if style == "rowwise_split_input":
            module.register_forward_pre_hook(_Split(group))
        if style.startswith("rowwise"):
            module.register_forward_hook(_Sum(group))
        if style == "colwise_gather_output":
            module.register_forward_hook(_Join(group))
    head = next(
        (path for path, module in model.named_modules() if module is model.get_output_embeddings()), ""
    )
    model.register_forward_hook(_End(group, share=head not in styles))
