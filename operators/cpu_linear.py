"""Dense linear layers on the CPU, from weights packed in RAM, through the kernels of `cpu_experts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.checkpoints.formats.base import Codes, Fp8Blocks, GgufRows, Nvfp4
from ktinject.checkpoints.packed import PackedWeights
from ktinject.errors import OperatorError
from ktinject.operators import expert_formats
from ktinject.operators.base import Config, register_operator
from ktinject.operators.cpu_experts import check_kernel, weights_in_words
from ktinject.operators.expert_formats import FLOATS, FP8_SIDE, K_QUANTS, CpuWeights
from ktinject.operators.linears.packed_linear import PackedLinear

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored
    from ktinject.machine import Machine


@dataclass(frozen=True)
class CpuLinearConfig(Config):
    """Arguments of `cpu_linear` in a rule."""

    # The format in memory. kept: the checkpoint's own, and bf16 where none of these is
    weights: Literal[CpuWeights, "kept"] = "bf16"
    group_size: Literal[128, 64, 32] = 128  # int4 only: how many inputs share a scale
    symmetric: bool = True  # int4 only; false adds a zero point to each group's scale
    kernel: str = "auto"  # a row of the kernel table, as `ktinject doctor` lists them; auto: the best

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.weights)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the native core takes as they are


def _taken_by(config: CpuLinearConfig) -> tuple[str, ...]:
    """What a layer of these weights takes as a checkpoint has it."""
    if config.weights == "int4":
        groups = f"int4/{config.group_size}"
        return (groups,) if config.symmetric else (groups, f"{groups} zeros")
    return (config.weights,) if config.weights in (*K_QUANTS, "fp8", *FLOATS, "int8") else ()


@register_operator("cpu_linear")
class CpuLinear(PackedLinear):
    """Runs a linear layer on the CPU. Takes every nn.Linear, and is an nn.Linear to others, such as PEFT.

    Weights are packed once, when loaded. Activations are rounded to bf16, or, for int8 and int4 weights, quantised to
    int8 with a scale for each token, but for a few values that are much larger than the others: these stay as they are.
    Sums are fp32. A checkpoint's own fp8 (in blocks of 128 × 128, or with a scale for each output), mxfp8, nvfp4, int8
    and int4 are taken as they are. K-quants (q2_k to q6_k, and iq4_xs) are the codes, scales and minima of a GGUF file,
    q8_0 the codes of Q8_0 or of other int8 in groups; activations are int8 with a scale for 256 inputs beside them, for
    128 beside q8_0. Inputs on another device are copied to the CPU, and the result is copied back. Gradients flow to
    the input as with the unpacked weight; weight and bias are frozen.
    """

    Config = CpuLinearConfig
    changing = frozenset({"_loaded_dtype"})
    # For `kept`: what its weights may become. Of one that is built, what it takes undecoded.
    native_formats: tuple[str, ...] = (*K_QUANTS, "fp8", *FLOATS, "mxfp4", "int8", "int4")

    def __init__(self, module: nn.Linear, config: CpuLinearConfig) -> None:
        if config.weights == "kept":  # what the checkpoint has in no format of the kernels'
            config = replace(config, weights="bf16")
        super().__init__(module, config)
        self.takes_stored_only = config.weights in K_QUANTS
        self.native_formats = _taken_by(config)
        self._loaded_dtype: torch.dtype | None = None
        try:
            self.native = _native.Linear(
                out_features=self.out_features,
                in_features=self.in_features,
                weights=config.weights,
                group_size=config.group_size if config.weights == "int4" else 0,
                symmetric=config.symmetric,
                has_bias=self.has_bias,
                kernel=config.kernel,
            )
        except ValueError as error:
            raise OperatorError(f"cpu_linear: {error}") from None

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        if config.weights != "kept":
            return config
        try:
            return replace(config, **expert_formats.of_linear(source))
        except ValueError:  # the rule asks for a kernel of another format
            return config

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if config.device not in ("auto", "cpu"):
            return f"it computes on the CPU and was given device {config.device}"
        reason = super().supports(module, config, machine)
        if reason:
            return reason
        assert isinstance(module, nn.Linear)
        if not module.weight.is_floating_point() or module.weight.dtype.itemsize == 1:
            return f"its weight is {module.weight.dtype}: it is quantised; inject into the plain model"
        try:
            cls(module, config)
        except OperatorError as error:
            return str(error).removeprefix("cpu_linear: ").removesuffix(".")
        return None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        if not isinstance(module, nn.Linear):
            raise OperatorError(
                f"cpu_linear: a {type(module).__name__} cannot be replaced: it is no nn.Linear."
            )
        return cls(module, config)

    def describe(self) -> dict[str, Any]:
        many, few = self.native.kernels
        return {
            "weights": weights_in_words(self.config),
            "kernel": many if many == few else f"{many}, {few} for few rows",
        }

    def footprint(self) -> dict[str, int]:
        return {"cpu": self.native.bytes}

    def allocate(self) -> None:
        try:
            self.native.allocate()
        except MemoryError as error:
            raise OperatorError(
                f"cpu_linear: no room for {self.native.bytes / 2**20:.1f} MiB of packed weights: {error}. "
                "Choose smaller weights (int8, int4, mxfp4) or a machine with more memory."
            ) from None

    def keeping(self, source: Format) -> str:
        return expert_formats.keeping(super().keeping(source), self.config.weights, source)

    def misfit_of(self, name: str, source: Format, part: int | None) -> str | None:
        if source.encoding == "fp8":
            return self._misfit(source.block)
        if name == "bias" or not self.takes_stored_only or source.encoding == self.config.weights:
            return None
        return (
            f"weights {self.config.weights} are kept from a checkpoint that has them, and the weight is {source.name} "
            "in the checkpoint; kept takes what it has"
        )

    @staticmethod
    def _misfit(block: tuple[int, int] | None) -> str | None:
        if block is None or block == (FP8_SIDE, FP8_SIDE):
            return None
        return (
            f"weight: the checkpoint has blocks of {block[0]} × {block[1]}; weights: fp8 keeps "
            f"{FP8_SIDE} × {FP8_SIDE}; choose other weights, for which the checkpoint is decoded"
        )

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        assert name == "weight" and expert is None and part is None, "a matrix that is stored as one"
        try:
            self._load_stored(stored)
        except (ValueError, OperatorError) as error:
            raise OperatorError(f"cpu_linear: weight: {error}.") from None
        self._loaded_dtype = None

    def _load_stored(self, stored: Stored) -> None:
        if self.takes_stored_only:
            assert isinstance(stored, (GgufRows, Codes)), "there are no others of such encodings"
            self.native.load_blocks(expert_formats.blocks(stored))
        elif isinstance(stored, Codes):
            expert_formats.check_order(stored)
            zeros = None if stored.zeros is None else stored.zeros.contiguous()
            self.native.load_integers(stored.codes, stored.scales.float().contiguous(), zeros)
        elif isinstance(stored, Nvfp4):
            scales = stored.scales.view(torch.uint8)
            self.native.load_nvfp4(stored.codes, scales, stored.factors.item())
        else:
            assert isinstance(stored, Fp8Blocks), "there are no other formats"
            if stored.block[0] > 1 and (misfit := self._misfit(stored.block)):
                raise OperatorError(misfit)
            self.native.load_fp8(stored.values.view(torch.uint8), stored.scales.contiguous())

    def accept(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        try:
            if name == "bias":
                self.native.load_bias(tensor)
            else:
                self.native.load(tensor)
                self._loaded_dtype = tensor.dtype
        except ValueError as error:
            raise OperatorError(f"cpu_linear: {error}.") from None

    def packed_weights(self) -> PackedWeights | None:
        found = PackedWeights.of_native(f"linear {weights_in_words(self.config)}", self.native.packed())
        return dataclasses.replace(found, state={"dtype": str(self._loaded_dtype).removeprefix("torch.")})

    def restored(self, state: Mapping[str, str]) -> None:
        self._loaded_dtype = getattr(torch, state["dtype"], None)
        self.native.mark_loaded()

    def finish(self) -> None:
        absent = [] if self.native.has_weight else ["weight"]
        absent += ["bias"] if self.has_bias and not self.native.has_bias else []
        if absent:
            raise OperatorError(f"cpu_linear: never loaded: {', '.join(absent)}.")

    def unwritable(self) -> str | None:
        if self.takes_stored_only:
            return f"{weights_in_words(self.config)} weights are those of a GGUF file, and others are not rounded to it"
        return None

    def is_lossless(self) -> bool:
        return self.config.weights == "bf16" and self._loaded_dtype == torch.bfloat16

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        """The fp32 `weight` [out, in] or `bias` [out]."""
        if name not in self.parameter_shapes() or expert is not None:
            raise OperatorError(
                f"cpu_linear: found parameter {name}; allowed: {', '.join(self.parameter_shapes())}."
            )
        self.finish()
        out = torch.empty(self.parameter_shapes()[name], dtype=torch.float32, device="cpu")
        (self.native.unpack_bias if name == "bias" else self.native.unpack)(out)
        return out

    def unpacked(self, name: str) -> Tensor:
        return self.unpack(name).to(self.dtype)

    def compute(self, x: Tensor) -> Tensor:
        """forward without autograd: one native call, the GIL released."""
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            raise OperatorError(f"cpu_linear: found input {list(shape)}; expected [..., {self.in_features}].")
        here = x.detach() if x.requires_grad else x
        if not here.is_cpu or here.dtype not in _FLOATS:
            here = here.to("cpu", here.dtype if here.dtype in _FLOATS else torch.float32)
        # At decode every microsecond here counts: a model has hundreds of these layers.
        out = here.new_empty((*shape[:-1], self.out_features))
        try:
            self.native.forward(
                here.reshape(-1, self.in_features).contiguous(), out.view(-1, self.out_features)
            )
        except ValueError as error:
            raise OperatorError(f"cpu_linear: {error}.") from None
        return out if here is x else out.to(x.device, x.dtype)

    def compute_gradient(self, grad: Tensor) -> Tensor:
        return (grad.to("cpu", torch.float32) @ self.unpack("weight")).to(grad.device, grad.dtype)
