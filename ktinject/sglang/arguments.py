"""The constructor's arguments, checked: those of SGLang, and those of the fork that kt-kernel itself works with.

SGLang says `num_gpu_experts`, and means the experts 0 … n - 1; the fork says `gpu_experts_mask`, which may be any.

Source: sglang 0.5.11 to 0.5.23, sglang-kt 0.7.2 and kt-kernel 0.7.2, as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ktinject.errors import OperatorError, few, shown
from ktinject.sglang.ranks import ALL, Share


@dataclass(frozen=True)
class Method:
    """What a name of --kt-method means.

    weights   as the operators name formats; near: as the checkpoint has them, or the most accurate format that is not
              much larger
    stored    what the names or encodings of the checkpoint's formats begin with; none: any
    """

    weights: str
    stored: tuple[str, ...] = ()

    def reads(self, form: Any) -> bool:
        """Whether weights in this format of a checkpoint are meant."""
        names = (form.name, form.encoding)
        return not self.stored or any(name.startswith(self.stored) for name in names if name)


ANEW = (
    "Name AMXINT4 or AMXINT8, by which any checkpoint is packed anew, BF16, or AUTO, which keeps it as it is"
)
METHODS: Mapping[str, Method] = {
    "AMXINT4": Method("int4"),
    "AMXINT8": Method("int8"),
    "MOE_INT4": Method("int4"),
    "MOE_INT8": Method("int8"),
    "BF16": Method("bf16"),
    "FP8": Method("near", ("fp8",)),
    "FP8_PERCHANNEL": Method("near", ("fp8",)),
    "MXFP8": Method("near", ("mxfp8",)),
    "RAWINT4": Method("near", ("int4",)),
    "GPTQ_INT4": Method("near", ("int4",)),
    "MXFP4": Method("near", ("mxfp4",)),
    "NVFP4": Method("near", ("nvfp4",)),
    "LLAMAFILE": Method("near"),
    # The operators' own names.
    "INT4": Method("int4"),
    "INT8": Method("int8"),
    "AUTO": Method("kept"),
}
# kt-kernel's arguments for training, which mean nothing in inference; at these values they are no wish.
_TRAINING = {
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.0,
    "max_cache_depth": 1,
    "group_size": 128,
    "zero_point": True,
    "full_weight_grad": False,
    "cpu_save": False,
}


@dataclass(frozen=True)
class Arguments:
    """What SGLang says of a layer.

    layer_idx           number of the layer in the checkpoint
    num_experts         of the layer, those on the GPU and slots of shared experts included
    top_k               experts of a token: the width of ids and weights
    num_gpu_experts     so many are on the GPU
    mask                [num_experts] bool, those on the GPU; None: the first num_gpu_experts
    threads             of the CPU pool; None: ktinject decides
    nodes               NUMA nodes that the weights are cut for, at most
    weight_path         folder or file of the checkpoint
    method              how the weights are packed
    method_name         its name as it was given
    deferred            of a token's experts, so many come one layer later
    swiglu_limit        h = silu(min(gate, limit)) · clamp(up, ±limit); 0: none
    swiglu_alpha        h = gate · sigmoid(alpha · gate) · (up + 1); 0: silu
    most_tokens         of a prompt's part, chunked_prefill_size; 0: not known
    share               of the experts that are on the CPU, those of this process; with a mask, all
    """

    layer_idx: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_gpu_experts: int
    mask: Tensor | None
    threads: int | None
    nodes: int
    weight_path: str
    method: Method
    method_name: str
    deferred: int
    swiglu_limit: float
    swiglu_alpha: float
    most_tokens: int = 0
    share: Share = ALL

    @property
    def held(self) -> range:
        """The experts whose weights this process has in RAM. With a mask that may change, all of them."""
        if self.mask is not None:
            return range(self.num_experts)
        return range(*self.share.of(self.num_gpu_experts, self.num_experts))

    def is_on_gpu(self, expert: int) -> bool:
        return bool(self.mask[expert]) if self.mask is not None else expert < self.num_gpu_experts


def method_of(name: Any) -> Method:
    """What a name means, in any case. Raises OperatorError for one that means nothing here."""
    allowed = ", ".join(METHODS)
    known = str(name).upper()
    if known.endswith("_SFT"):
        raise OperatorError(f"--kt-method {name}: {NO_LORA}")
    if known not in METHODS:
        raise OperatorError(f"--kt-method: found {shown(name)}; allowed: {allowed}. Write one of these.")
    return METHODS[known]


NO_LORA = (
    "LoRA on the experts of the CPU is not served. Merge the adapter into the weights "
    "(peft: `merge_and_unload`), and give --model-path and --kt-weight-path the merged model."
)


def check_others(given: Mapping[str, Any]) -> None:
    """Refuse arguments that are not known, and those for training. Raises OperatorError."""
    mode = given.get("mode", "inference")
    if mode == "sft":
        raise OperatorError(f"KTMoEWrapper: mode='sft': {NO_LORA}")
    if mode != "inference":
        raise OperatorError(f"KTMoEWrapper: mode: found {shown(mode)}; allowed: 'inference'.")
    for name, value in given.items():
        if name in _TRAINING and value != _TRAINING[name]:
            if "lora" in name:
                raise OperatorError(f"KTMoEWrapper: {name}={shown(value)}: {NO_LORA}")
            raise OperatorError(
                f"KTMoEWrapper: {name}: found {shown(value)}; allowed: {_TRAINING[name]}. It is for training."
            )
    if unknown := sorted(given.keys() - _TRAINING.keys() - {"mode"}):
        raise OperatorError(
            f"KTMoEWrapper: unknown arguments {', '.join(few(unknown))}. Known are those of SGLang 0.5.11 to 0.5.23 "
            "and of sglang-kt 0.7.2: install one of these, or a ktinject that knows your SGLang."
        )


def placed(num_experts: int, num_gpu_experts: int | None, mask: Tensor | None) -> tuple[int, Tensor | None]:
    """How many experts are on the GPU, and which, where they are not the first. Raises OperatorError."""
    if mask is None:
        count = num_gpu_experts
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= num_experts:
            raise OperatorError(
                f"--kt-num-gpu-experts: found {shown(count)}; allowed: 0 to {num_experts}, the experts of a layer. "
                "Write how many experts of each layer the GPU has."
            )
        return count, None
    found = mask.detach().to("cpu").bool()
    if list(found.shape) != [num_experts]:
        raise OperatorError(
            f"KTMoEWrapper: gpu_experts_mask: found {list(found.shape)}; expected [{num_experts}]."
        )
    count = int(found.sum())
    if num_gpu_experts not in (None, count):
        raise OperatorError(
            f"KTMoEWrapper: gpu_experts_mask names {count} experts and num_gpu_experts is {num_gpu_experts}. "
            "Give one of them."
        )
    return count, found


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number in a range. Raises OperatorError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise OperatorError(f"KTMoEWrapper: {name}: found {shown(value)}; allowed: {least} to {most}.")
    return value


def swiglu(limit: Any, alpha: Any, method: str) -> tuple[float, float]:
    """The two numbers. Raises OperatorError for what no expert has."""
    for name, value in (("swiglu_limit", limit), ("swiglu_alpha", alpha)):
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise OperatorError(f"KTMoEWrapper: {name}: found {shown(value)}; allowed: 0 or more ({method}).")
    return float(limit), float(alpha)
