"""Routed experts on the CPU, from weights packed in RAM, through ktinject's native kernels."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.checkpoints.formats.base import Codes, Fp8Blocks, GgufRows, Nvfp4
from ktinject.checkpoints.packed import PackedWeights
from ktinject.errors import OperatorError
from ktinject.operators import expert_formats
from ktinject.operators.base import Config, Operator, register_operator
from ktinject.operators.expert_formats import FP8_SIDE, K_QUANTS, CpuWeights, KQuant
from ktinject.operators.probes import experts as routed_experts
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.operators.torch_ops.experts import experts_op, handle_of
from ktinject.support import Support

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored
    from ktinject.machine import Machine


@dataclass(frozen=True)
class CpuExpertsConfig(Config):
    """Arguments of `cpu_experts` in a rule."""

    # The format in memory; kept: the checkpoint's own, bf16 where none of these is; auto: the most accurate one that
    # fits, with int4 in groups of group_size or smaller ones
    weights: Literal[CpuWeights, "kept", "auto"] = "bf16"
    # The format of the down projection, where a GGUF file has another K-quant for it
    down_weights: Literal["same", KQuant] = "same"
    group_size: Literal[128, 64, 32] = 128  # int4 only: how many inputs share a scale
    symmetric: bool = True  # int4 only; false adds a zero point to each group's scale
    kernel: str = "auto"  # a row of the kernel table, as `ktinject doctor` lists them; auto: the best
    # For how many NUMA nodes the weights are cut; auto: all nodes; 1: not at all.
    numa: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_kernel(self.kernel, self.weights)
        if self.numa != "auto" and self.numa < 1:
            raise ValueError(
                f"numa is {self.numa}; it is auto or a number of nodes, 1 or more. Write one of these."
            )


@functools.cache
def _kernels_for(weights: str) -> tuple[str, ...]:
    return tuple(row["name"] for row in _native.kernels() if weights in (row["weights"], "auto", "kept"))


def check_kernel(kernel: str, weights: str) -> None:
    """Raises ValueError for a name that no kernel for these weights has."""
    names = ("auto", *_kernels_for(weights))
    if kernel not in names:
        raise ValueError(
            f"kernel is {kernel[:60]!r}; for weights {weights} it is {', '.join(names)}. Write one of these."
        )


def native_experts(
    spec: ExpertsSpec,
    weights: str,
    group_size: int,
    kernel: str,
    symmetric: bool = True,
    numa: int | Literal["auto"] = "auto",
    down_weights: str = "same",
) -> _native.Experts:
    """The native experts of a layer, empty. Raises OperatorError for what the core does not serve."""
    try:
        return _native.Experts(
            experts=spec.num_experts,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            weights=weights,
            down_weights="" if down_weights == "same" else down_weights,
            group_size=group_size if weights == "int4" else 0,
            symmetric=symmetric,
            has_gate=spec.has_gate,
            has_bias=spec.has_bias,
            activation=spec.activation,
            alpha=spec.alpha,
            gate_max=spec.gate_max,
            up_limit=spec.up_limit,
            up_offset=spec.up_offset,
            kernel=kernel,
            nodes=0 if numa == "auto" else numa,
        )
    except ValueError as error:
        raise OperatorError(f"cpu_experts: {error}") from None


def weights_in_words(config: Any) -> str:
    """The weight format of a config with `weights`, `group_size` and `symmetric`, for the plan."""
    if config.weights in K_QUANTS:
        down = getattr(config, "down_weights", "same")
        return str(config.weights) if down == "same" else f"{config.weights}, down {down}"
    if config.weights != "int4":
        return str(config.weights)
    return f"int4 group {config.group_size}" + ("" if config.symmetric else " with zero points")


@functools.cache  # once a process, not once a layer
def _warn_not_placed(reason: str) -> None:
    logging.getLogger("ktinject").warning(
        "cpu_experts: the system does not let memory be placed on NUMA nodes (mbind: %s). Packed experts go where "
        "the workers of each node touch them first. A container may need the capability SYS_NICE.",
        reason,
    )


# Buffers that all layers share: prompts of so many tokens are computed in one pass, where a token has so many experts.
PASSES = "passes over long prompts"
_PASS_TOKENS, _PASS_EXPERTS = 8192, 8
_MOST_STEP_ROWS = 64  # tokens of a captured step
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the native core takes as they are


class _OfRows:
    """What is put before operators of experts whose forward takes rows alone, as Llama 4's does."""

    spec: ExpertsSpec

    def forward(self, rows: Tensor) -> Tensor:
        """rows [experts · m, hidden], the rows of each expert together → the same shape; rows of zeros stay zeros."""
        m = len(rows) // self.spec.num_experts
        expert = torch.arange(len(rows), device=rows.device)[:, None] // max(1, m)
        used = rows.any(-1)
        # In a step that a graph may hold, nothing may depend on their number: other rows are sent along, and skipped.
        if rows.is_cuda and m <= _MOST_STEP_ROWS:
            return self._computed(rows, torch.where(used[:, None], expert, -1))
        chosen = used.nonzero()[:, 0]
        return torch.zeros_like(rows).index_copy(0, chosen, self._computed(rows[chosen], expert[chosen]))

    def _computed(self, rows: Tensor, expert: Tensor) -> Tensor:
        out: Tensor = super().forward(rows, expert, torch.ones_like(expert, dtype=torch.float32))  # type: ignore[misc]
        return out


@register_operator("cpu_experts")
class CpuExperts(Operator):
    """Runs routed experts on the CPU. Takes every experts module with transformers' standard signature, and Llama 4's.

    Weights are packed once, when loaded. Activations are rounded to bf16, or, for int8 and int4 weights, quantised to
    int8 with a scale for each token, but for a few values that are much larger than the others: these stay as they are.
    Sums are fp32. fp8 is e4m3 with a scale for 128 × 128 weights, fp8_channel with one for each output, mxfp8 with a
    power of two for 32 inputs; mxfp4 is e2m1 with the same, nvfp4 with an e4m3 scale for 16 and a factor for all.
    K-quants (q2_k to q6_k, and iq4_xs) are the codes, scales and minima of a GGUF file, q8_0 the codes of Q8_0 or of
    other int8 in groups; activations are int8 with a scale for 256 inputs beside them, for 128 beside q8_0. Inputs on
    another device are copied to the CPU, and the result is copied back.
    """

    Config = CpuExpertsConfig
    per_expert = True
    packs_alone = True
    on_ranks = "first"

    def __init__(self, spec: ExpertsSpec, config: CpuExpertsConfig) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        self.num_experts = spec.num_experts
        self.native = self.native_of(spec, config)
        if config.weights in ("fp8", "fp8_channel", "mxfp8", "int8"):
            self.native_formats = (config.weights,)
        elif config.weights == "nvfp4":
            self.native_formats = ("nvfp4 across" if spec.is_transposed else "nvfp4",)
        elif config.weights == "int4":
            groups = f"int4/{config.group_size}"
            self.native_formats = (groups,) if config.symmetric else (groups, f"{groups} zeros")
        elif config.weights in K_QUANTS:
            self.native_formats = (config.weights, self._down_weights)
            self.takes_stored_only = True
        self._loaded_dtype: torch.dtype | None = None
        self._handle = handle_of(self)

    @classmethod
    def native_of(cls, spec: ExpertsSpec, config: Any) -> _native.Experts:
        """The native experts, empty. Raises OperatorError for what the operator does not serve."""
        return native_experts(
            spec,
            config.weights,
            config.group_size,
            config.kernel,
            config.symmetric,
            config.numa,
            config.down_weights,
        )

    @property
    def _down_weights(self) -> str:
        same = self.config.down_weights == "same"
        return str(self.config.weights if same else self.config.down_weights)

    @classmethod
    def weight_formats(cls, config: Any, stored: Collection[tuple[str, Format]]) -> Sequence[tuple[int, Any]]:
        weights = [found for found in stored if not found[0].endswith("_bias")]
        return expert_formats.choices(config, [form for _, form in weights], expert_formats.k_quants(weights))

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if config.device not in ("auto", "cpu"):
            return f"it computes on the CPU and was given device {config.device}"
        return cls._unsupported(module, config)

    @classmethod
    def _unsupported(cls, module: nn.Module, config: Any) -> str | None:
        spec = routed_experts.probe(module)
        if isinstance(spec, Support):
            return spec.reason
        try:
            cls.native_of(spec, config)
        except OperatorError as error:
            return str(error).removeprefix("cpu_experts: ").removeprefix(f"{cls.name}: ").removesuffix(".")
        return None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        spec = routed_experts.probe(module)
        if isinstance(spec, Support):
            raise OperatorError(f"{cls.name}: {type(module).__name__} cannot be replaced: {spec.reason}.")
        if not spec.takes_rows:
            return cls(spec, config)
        kind: type[Self] = type(f"{cls.__name__}OfRows", (_OfRows, cls), {})
        return kind(spec, config)

    def describe(self) -> dict[str, Any]:
        kernels = {*self.native.kernels, *self.native.down_kernels}
        many, few = self.native.kernels
        shards = len(self.native.shards)
        return {
            "weights": weights_in_words(self.config),
            "kernel": f"{many}, {few} for few rows" if many != few else ", ".join(sorted(kernels)),
        } | ({"numa": f"cut for {shards} nodes"} if shards > 1 else {})

    def footprint(self) -> dict[str, int]:
        return {"cpu": self.native.bytes}

    def workspace(self) -> dict[tuple[str, str], tuple[int, int]]:
        # With less, a prompt is cut into more passes, each of which reads the weights.
        return {("cpu", PASSES): (0, self.native.workspace_bytes(_PASS_TOKENS, _PASS_EXPERTS))}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return routed_experts.parameter_shapes(self.spec)

    def allocate(self) -> None:
        try:
            self.native.allocate()
        except MemoryError as error:
            raise OperatorError(
                f"{self.name}: no room for {self.native.bytes / 2**20:,.1f} MiB of packed experts: {error}. "
                "Choose smaller weights (int8, int4, mxfp4) or a machine with more memory."
            ) from None
        if self.native.not_placed:
            _warn_not_placed(self.native.not_placed)
            self._touch()

    def _touch(self) -> None:
        """Have the workers of each NUMA node take its part of the memory."""
        self.native.touch()

    @property
    def repeats(self) -> bool:
        """Whether `repeat` can be called."""
        return True

    def repeat(self, expert: int) -> None:
        """Copy one expert to all others, for models of random weights."""
        self.native.repeat(expert)

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        if tensor.dtype == torch.float64:
            tensor = tensor.float()
        if tensor.dtype not in _FLOATS:
            raise OperatorError(
                f"{self.name}: {name}: found dtype {tensor.dtype}; allowed: float64, float32, bfloat16, float16. "
                "Quantised codes have to be decoded first."
            )
        if self._loaded_dtype is None:
            self._loaded_dtype = tensor.dtype
        try:
            views = routed_experts.views(self.spec, name, tensor.detach(), expert, part)
        except OperatorError as error:
            raise OperatorError(f"{self.name}: {error}") from None
        if len(views) > 1 and self.config.weights != "bf16" and not self.native.absent(1):
            # Of experts that are there, all that is written is new, or nothing: the core sees to it for one projection.
            for projection, e, view in views:
                if not projection.endswith("_bias") and not view.isfinite().all():
                    raise OperatorError(
                        f"{self.name}: {name}: expert {e}, {projection}: holds a NaN or an infinity, so it has no "
                        "scale."
                    )
        for projection, e, view in views:
            try:
                self._pack(projection, e, view)
            except ValueError as error:
                raise OperatorError(f"{self.name}: {name}: {error}.") from None

    def misfit_of(self, name: str, source: Format, part: int | None) -> str | None:
        if self.takes_stored_only:
            return self._misfit_of_k_quant(name, source)
        if source.encoding in ("fp8_channel", "mxfp8") and self.spec.is_transposed:
            return f"{name}: its scales are for inputs; choose other weights, for which the checkpoint is decoded"
        return self._misfit(name, source.block, part) if source.encoding == "fp8" else None

    def _misfit_of_k_quant(self, name: str, source: Format) -> str | None:
        if name.endswith("_bias"):
            return None
        wanted = self._down_weights if name.startswith("down_proj") else self.config.weights
        argument = "down_weights" if wanted != self.config.weights else "weights"
        if source.encoding != wanted:
            return (
                f"{argument} {wanted} are kept from a checkpoint that has them, and {name} is {source.name} in the "
                "checkpoint; kept takes what it has"
            )
        if self.spec.is_transposed:
            return f"{argument} {wanted} are rows of outputs, and {name} is transposed; choose other weights"
        return None

    def keeping(self, source: Format) -> str:
        return expert_formats.keeping(super().keeping(source), self.config.weights, source)

    def _misfit(self, name: str, block: tuple[int, int] | None, part: int | None) -> str | None:
        spec, side = self.spec, FP8_SIDE
        advice = "choose other weights, for which the checkpoint is decoded"
        if block is not None and block != (side, side):
            found = f"the checkpoint has blocks of {block[0]} × {block[1]}"
            return f"{name}: {found}; weights: fp8 keeps {side} × {side}; {advice}"
        together = name == "gate_up_proj" and part is None
        if together and (not spec.is_concatenated or spec.intermediate_size % side):
            shared = f"gate and up share blocks of {side} × {side}"
            return f"{name}: {shared}; weights: fp8 keeps blocks of one of them; {advice}"
        return None

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        if self.takes_stored_only:
            assert isinstance(stored, (GgufRows, Codes)), "there are no others of such encodings"
            return self._load_rows(name, stored, expert, part)
        if isinstance(stored, Codes):
            return self._load_integers(name, stored, expert, part)
        if isinstance(stored, Nvfp4):
            return self._load_nvfp4(name, stored, expert, part)
        assert isinstance(stored, Fp8Blocks), "only fp8 weights are taken"
        spec, side = self.spec, FP8_SIDE
        if stored.block[0] == 1:  # fp8_channel and mxfp8
            grid = self._with_inputs(name, stored.scales.shape[-1])
        elif misfit := self._misfit(name, stored.block, part):
            raise OperatorError(f"{self.name}: {misfit}.")
        else:
            grid = dataclasses.replace(
                spec,
                hidden_size=-(-spec.hidden_size // side),
                intermediate_size=-(-spec.intermediate_size // side),
            )
        codes = routed_experts.views(spec, name, stored.values.view(torch.uint8), expert, part)
        scales = routed_experts.views(grid, name, stored.scales, expert, part)
        for (projection, e, values), (_, _, factors) in zip(codes, scales):
            try:
                self._pack_fp8(projection, e, values, factors.contiguous())
            except ValueError as error:
                raise OperatorError(f"{self.name}: {name}: {error}.") from None

    def _with_inputs(self, name: str, inputs: int) -> ExpertsSpec:
        """For cutting what belongs to the weights of a parameter: the experts as if it had so many inputs."""
        if name.startswith("down_proj"):
            return dataclasses.replace(self.spec, intermediate_size=inputs)
        return dataclasses.replace(self.spec, hidden_size=inputs)

    def _load_nvfp4(self, name: str, stored: Nvfp4, expert: int | None, part: int | None) -> None:
        along = -2 if self.spec.is_transposed else -1
        try:
            pieces = [
                routed_experts.views(self._with_inputs(name, t.shape[along]), name, t, expert, part)
                for t in (stored.codes, stored.scales.view(torch.uint8))
            ]
            for (projection, e, codes), (_, _, scales) in zip(*pieces):
                factor = stored.factors[e] if stored.factors.dim() else stored.factors
                self._pack_nvfp4(projection, e, codes, scales, factor.item())
        except (ValueError, OperatorError) as error:
            raise OperatorError(f"{self.name}: {name}: {error}.") from None

    def _load_rows(self, name: str, stored: GgufRows | Codes, expert: int | None, part: int | None) -> None:
        """What rows [..., n, bytes] are of a projection is checked in terms of their bytes."""
        try:
            rows = expert_formats.blocks(stored)
            grid = self._with_inputs(name, rows.shape[-1])
            for projection, e, view in routed_experts.views(grid, name, rows, expert, part):
                self._pack_rows(projection, e, view)
        except (ValueError, OperatorError) as error:
            raise OperatorError(f"{self.name}: {name}: {error}.") from None

    def _pack_rows(self, projection: str, expert: int, rows: Tensor) -> None:
        self.native.load_blocks(projection, expert, rows)

    def _load_integers(self, name: str, stored: Codes, expert: int | None, part: int | None) -> None:
        try:
            for piece in expert_formats.integers(self.spec, name, stored, expert, part):
                self._pack_integers(*piece)
        except (ValueError, OperatorError) as error:
            raise OperatorError(f"{self.name}: {name}: {error}.") from None

    def _pack_integers(
        self, projection: str, expert: int, codes: Tensor, scales: Tensor, zeros: Tensor | None
    ) -> None:
        self.native.load_integers(projection, expert, codes, scales, zeros)

    def _pack_fp8(self, projection: str, expert: int, codes: Tensor, scales: Tensor) -> None:
        self.native.load_fp8(projection, expert, codes, scales)

    def _pack_nvfp4(self, projection: str, expert: int, codes: Tensor, scales: Tensor, factor: float) -> None:
        self.native.load_nvfp4(projection, expert, codes, scales, factor)

    def _pack(self, projection: str, expert: int, view: Tensor) -> None:
        if projection.endswith("_bias"):
            self.native.load_bias(projection.removesuffix("_bias"), expert, view)
        else:
            self.native.load(projection, expert, view)

    def packed_weights(self) -> PackedWeights | None:
        gate = "" if self.spec.has_gate else " without gate"
        form = f"experts {weights_in_words(self.config)}{gate}"
        found = PackedWeights.of_native(form, self.native.packed())
        return dataclasses.replace(found, state={"dtype": str(self._loaded_dtype).removeprefix("torch.")})

    def restored(self, state: Mapping[str, str]) -> None:
        self._loaded_dtype = getattr(torch, state["dtype"], None)
        self.native.mark_loaded()

    def finish(self) -> None:
        limit = 20
        absent = self.native.absent(limit + 1)
        if absent:
            more = ", …" if len(absent) > limit else ""
            raise OperatorError(f"{self.name}: never loaded: {', '.join(absent[:limit])}{more}.")

    def unwritable(self) -> str | None:
        if self.takes_stored_only:
            return f"{weights_in_words(self.config)} weights are those of a GGUF file, and others are not rounded to it"
        return None

    def is_lossless(self) -> bool:
        return self.config.weights == "bf16" and self._loaded_dtype == torch.bfloat16

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        """The fp32 weights of parameter `name` in the replaced module's layout; of one expert if given."""
        shapes = routed_experts.parameter_shapes(self.spec)
        if name not in shapes:
            raise OperatorError(f"{self.name}: found parameter {name}; allowed: {', '.join(shapes)}.")
        if expert is not None and not 0 <= expert < self.num_experts:
            raise OperatorError(f"{self.name}: found expert {expert}; allowed: 0 to {self.num_experts - 1}.")
        shape = shapes[name]
        experts = range(self.num_experts) if expert is None else [expert]
        whole = torch.empty((len(experts), *shape[1:]), dtype=torch.float32, device="cpu")
        for row, e in enumerate(experts):
            for projection, _, view in routed_experts.views(self.spec, name, whole[row], e, None):
                value = torch.empty(view.shape, dtype=torch.float32, device="cpu")
                try:
                    if projection.endswith("_bias"):
                        self.native.unpack_bias(projection.removesuffix("_bias"), e, value)
                    else:
                        self.native.unpack(projection, e, value)
                except ValueError as error:
                    raise OperatorError(f"{self.name}: {name}: {error}.") from None
                view.copy_(value)
        return whole if expert is None else whole[0]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden], top_k_index and top_k_weights [m, t] → [m, hidden], dtype and device kept.

        Ids of -1 and num_experts are skipped. Raises OperatorError for any other id that is no expert.
        """
        needs_graph = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
        if torch.compiler.is_compiling() or needs_graph:
            return experts_op(hidden_states, top_k_index, top_k_weights, self._handle)
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """forward without autograd: one native call, the GIL released."""
        x = hidden_states.detach().to("cpu").contiguous()
        if x.dtype not in _FLOATS:
            x = x.float()
        index = top_k_index.to("cpu").contiguous()
        if index.dtype.is_floating_point or index.dtype == torch.bool:
            raise OperatorError(f"{self.name}: top_k_index: found {index.dtype}; allowed: integers.")
        if index.dtype not in (torch.int64, torch.int32):
            index = index.long()
        weights = top_k_weights.detach().to("cpu", torch.float32).contiguous()
        out = torch.empty_like(x)
        try:
            self.native.forward(x, index, weights, out)
        except (IndexError, ValueError) as error:
            raise OperatorError(f"{self.name}: {error}.") from None
        except TypeError:
            found = ", ".join(str(list(tensor.shape)) for tensor in (x, index, weights))
            raise OperatorError(
                f"{self.name}: hidden_states, top_k_index and top_k_weights: "
                f"found shapes {found}; expected [m, {self.spec.hidden_size}], [m, t], [m, t]."
            ) from None
        return out.to(hidden_states.device, hidden_states.dtype)

    def extra_repr(self) -> str:
        spec = self.spec
        shape = (
            f"{spec.num_experts} experts, {spec.hidden_size} → {spec.intermediate_size} → {spec.hidden_size}"
        )
        return f"{shape}, {self.describe()['weights']}, {self.native.kernels[0]}"
