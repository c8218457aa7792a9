"""A linear layer on the GPU with int4 weights, multiplied by ktinject's own kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject import _native
from ktinject.addresses import address
from ktinject.checkpoints.formats.base import Codes
from ktinject.errors import OperatorError
from ktinject.machine import has_gpu
from ktinject.operators.base import Config, register_operator
from ktinject.operators.linears import int4_layout
from ktinject.operators.linears.gpu_linear import GpuLinear
from ktinject.operators.linears.int4_choice import MANY_TOKENS, MANY_TOKENS_SM80, bf16_is_faster, is_small
from ktinject.operators.linears.int4_layout import TILE

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored


@dataclass(frozen=True)
class Int4LinearConfig(Config):
    """Arguments of `int4_linear` in a rule."""

    group_size: Literal[128, 64, 32, -1] = 128  # how many inputs share a scale; -1: all inputs of an output
    symmetric: bool = True  # codes from -8 to 7; false adds a zero point to each group
    # Keep an unpacked copy in the model's 16 bits beside the int4 weights, for numbers of tokens with which cuBLAS is
    # faster: five times the memory
    bf16_copy: bool = False


@dataclass(frozen=True)
class _AsStored(Int4LinearConfig):
    """For codes that are taken from the checkpoint as they are: its group size and its zero points."""

    group_size: int = 128  # type: ignore[assignment]  # 32, or any multiple of 64
    source: str = ""
    names_groups: bool = False  # the checkpoint has a g_idx, which may put the inputs of a group anywhere


_TURNS = 4  # sets of counters that calls take in turns, so that calls on several streams do not share one


def _is_hopper(device: str) -> bool:
    return has_gpu(device) and torch.cuda.get_device_capability(device) == (9, 0)


@register_operator("int4_linear")
class Int4Linear(GpuLinear):
    """Runs a linear layer on a GPU with int4 weights in groups: compute capability 8.0 or newer.

    Weights are quantised when loaded, or taken exactly from a checkpoint that has them in int4. A kernel of ktinject
    multiplies up to 4096 tokens on Hopper and up to 256 elsewhere. For more tokens the weight is unpacked and cuBLAS
    multiplies; on Hopper also for a small layer with 193 to 512 tokens, where that is faster. Sums are fp32. Up to 16
    tokens on Hopper and 256 elsewhere, codes and scales are exact. With more tokens each weight is rounded once to the
    activations' dtype; ktinject's own quantisation chooses scales for which that rounding changes nothing.

    With `bf16_copy`, the weight is unpacked once, when it is loaded, and cuBLAS multiplies by the copy where that is
    faster for the layer and the number of tokens: never up to 64 tokens, always for more than 1024. Between these it
    goes by what was measured for the layer on an H200. Other layers on Hopper use the copy from 65 tokens on if they
    have fewer than 40 million weights. Larger ones, and other GPUs, use it from 129 on.
    """

    Config = Int4LinearConfig
    changing = frozenset({"_turn"})
    native_formats = ("int4",)
    sm80_only = False  # for tests: run the sm_80 kernels on Hopper, too
    # For compute-sanitizer's racecheck, which does not know that __syncwarp orders a warp's reads.
    every_lane = False
    # To test and measure each kind of blocks on Hopper: native/cuda/int4_blocks.hpp, `Blocks`.
    blocks: tuple[int, int, int] | None = None

    def __init__(self, module: nn.Linear, config: Int4LinearConfig) -> None:
        super().__init__(module, config)
        self.group_size = self.in_features if config.group_size == -1 else config.group_size
        self.has_zeros = not config.symmetric
        self._scale_dtype = torch.bfloat16
        self._native: Any = None
        self._names_groups = isinstance(config, _AsStored) and config.names_groups
        self._order: Tensor | None = None  # [k] int64: position → the checkpoint's input; None: same order
        self._turn = 0
        self._copy: Tensor | None = None  # [n, k] of the model's dtype, inputs in the checkpoint's order
        self._copy_bias: Tensor | None = None  # [n] of that dtype
        hopper = _is_hopper(config.device)
        self._arch = "sm90" if hopper else "sm80"
        self._many_tokens = MANY_TOKENS if hopper else MANY_TOKENS_SM80
        self._multiprocessors = (
            torch.cuda.get_device_properties(config.device).multi_processor_count if hopper else 0
        )

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        group_size = -1 if source.shape and source.group_size == source.shape[1] else source.group_size
        names_groups = any(name.endswith("g_idx") for name in source.companions)
        return _AsStored(
            device=config.device,
            group_size=group_size,
            symmetric=not source.has_zeros,
            bf16_copy=config.bf16_copy,
            source=source.name,
            names_groups=names_groups,
        )

    @classmethod
    def misfit(cls, k: int, n: int, config: Any) -> str | None:
        if k % TILE or k == 0 or n == 0:
            return f"it has {k} inputs and {n} outputs; inputs must be a multiple of {TILE}, and there must be outputs"
        group_size = k if config.group_size == -1 else config.group_size
        if group_size != 32 and group_size % TILE:
            return f"the checkpoint has groups of {group_size} inputs; served are 32 and multiples of {TILE}"
        if k % group_size:
            return f"group_size {group_size} does not divide its {k} inputs; choose a smaller one, or -1"
        return None

    def describe(self) -> dict[str, Any]:
        group = "a scale a row" if self.config.group_size == -1 else f"group {self.group_size}"
        source = f", as stored ({self.config.source})" if isinstance(self.config, _AsStored) else ""
        weights = f"int4 {group}{', zero points' if self.has_zeros else ''}{source}"
        kernel = f"int4_linear_{self._arch}, cuBLAS"
        if self.config.bf16_copy:
            dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
            return {
                "weights": f"{weights} with {dtype} copy",
                "kernel": f"{kernel} with the copy where faster",
            }
        small = ", and for 193 to 512 where faster" if self._arch == "sm90" else ""
        return {"weights": weights, "kernel": f"{kernel} beyond {self._many_tokens} tokens{small}"}

    def keeping(self, source: Format) -> str:
        return "kept" if source.is_taken(self.native_formats) else "quantised again"

    def _sizes(self) -> tuple[int, int, int]:
        """The numbers of words, of scales, and of counters in one set."""
        tiles = -(-self.out_features // TILE)
        words = tiles * TILE * self.in_features // 8
        counters = -(-self.out_features // 256) * -(-MANY_TOKENS // 64)
        return words, tiles * TILE * (self.in_features // self.group_size), counters

    def footprint(self) -> dict[str, int]:
        words, scales, counters = self._sizes()
        bias = 4 * self.out_features if self.has_bias else 0
        copied = self.out_features * (self.in_features + self.has_bias) if self.config.bf16_copy else 0
        return {
            self.config.device: 4 * words
            + (4 if self.has_zeros else 2) * scales
            + 4 * _TURNS * counters
            + (8 * self.in_features if self._names_groups else 0)
            + bias
            + 2 * copied
        }

    def _allocate(self) -> None:
        words, scales, counters = self._sizes()
        device = self.config.device
        self._words = torch.empty(words, dtype=torch.int32, device=device)
        self._scales = torch.empty(
            scales, dtype=torch.int32 if self.has_zeros else torch.int16, device=device
        )
        self._counters = torch.zeros(_TURNS, counters, dtype=torch.int32, device=device)
        if self._names_groups:
            self._room = torch.empty(self.in_features, dtype=torch.int64, device=device)
        if self.config.bf16_copy:
            self._copy = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=device)
            if self.has_bias:
                self._copy_bias = torch.empty(self.out_features, dtype=self.dtype, device=device)

    def _pack(self, weight: Tensor) -> None:
        if self._order is not None:  # written to, see `PackedLinear.write`
            weight = weight[:, self._order]
        try:
            self._take(int4_layout.quantise(weight, self.group_size, self.config.symmetric), torch.bfloat16)
        except ValueError as error:
            raise OperatorError(f"int4_linear: weight: {error}; it cannot be quantised.") from None

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        assert isinstance(stored, Codes) and name == "weight", "only int4 weights are taken"
        groups = self.in_features // self.group_size
        if stored.codes.shape != (self.out_features, self.in_features) or stored.scales.shape[1] != groups:
            raise OperatorError(
                f"int4_linear: weight: found {list(stored.codes.shape)} in {stored.scales.shape[1]} groups; "
                f"expected {[self.out_features, self.in_features]} in {groups}."
            )
        zeros = stored.zeros
        if self.has_zeros and zeros is None:
            zeros = torch.full(stored.scales.shape, 8, dtype=torch.uint8, device="cpu")
        if zeros is not None and not self.has_zeros:
            raise OperatorError(
                "int4_linear: weight: found zero points; the plan has none. Set symmetric: false."
            )
        dtype = int4_layout.scale_dtype(stored.scales)
        if dtype is None:
            raise OperatorError(
                "int4_linear: weight: its scales fit neither bfloat16 nor float16, so it cannot be taken exactly. "
                "Use a checkpoint with scales of 16 bits."
            )
        order = None if stored.group_of is None else self._sorted(stored.group_of)
        device = self.config.device
        codes = stored.codes.to(device)
        if order is not None:
            assert self._names_groups, "a format with g_idx says so"
            self._order = self._room.copy_(order)
            codes = codes[:, self._order]
        zeros = None if zeros is None else zeros.to(device)
        self._take(Codes(codes, stored.scales.to(device), zeros), dtype)
        self._loaded.add(name)

    def _sorted(self, group_of: Tensor) -> Tensor:
        """An order [k] of the inputs in which each group is contiguous, for GPTQ's activation order.

        group_of   [k]: input → its group
        Raises     OperatorError if the groups differ in size
        """
        sizes = group_of.bincount(minlength=self.in_features // self.group_size)
        if bool((sizes != self.group_size).any()):
            raise OperatorError(
                f"int4_linear: weight: found groups of {int(sizes.min())} to {int(sizes.max())} inputs in g_idx; "
                f"expected {self.group_size} in each. Use another operator, which decodes the weight."
            )
        return group_of.argsort(stable=True)

    def _take(self, codes: Codes, dtype: torch.dtype) -> None:
        self._words.copy_(int4_layout.pack_codes(codes.codes))
        self._scales.copy_(int4_layout.pack_scales(codes.scales, codes.zeros, dtype))
        self._scale_dtype = dtype

    def finish(self) -> None:
        super().finish()
        if self.config.device.startswith("cuda"):
            self._make_native()  # on the CPU it can be filled and unpacked; its forward raises OperatorError
        if self._copy is not None:
            self._copy.copy_(self.dequantise(self.dtype))
        if self._copy_bias is not None and self._bias is not None:
            self._copy_bias.copy_(self._bias)

    def _make_native(self) -> None:
        device = torch.device(self.config.device)
        here = self._words.device
        self._native = _native.Int4Linear(
            words=address("words", self._words, here, torch.int32),
            scales=address("scales", self._scales, here),
            bias=address("bias", self._bias, here, torch.float32, (self.out_features,)),
            n=self.out_features,
            k=self.in_features,
            group_size=self.group_size,
            has_zeros=self.has_zeros,
            fp16_scales=self._scale_dtype == torch.float16,
            sm80_only=self.sm80_only,
            every_lane=self.every_lane,
            blocks=self.blocks,
            device=device.index or 0,
        )

    def codes(self) -> Codes:
        """The packed codes, scales and zero points, with inputs in the checkpoint's order."""
        self._at("weight")
        n, k = self.out_features, self.in_features
        scales, zeros = int4_layout.unpack_scales(self._scales, n, k // self.group_size, self._scale_dtype)
        codes = int4_layout.unpack_codes(self._words, n, k)
        if self._order is None:
            return Codes(codes, scales, zeros)
        group_of = torch.arange(k, device=codes.device) // self.group_size
        return Codes(self._as_stored(codes), scales, zeros, self._as_stored(group_of))

    def _as_stored(self, values: Tensor) -> Tensor:
        """Values with inputs in the last dimension, from the packed order to the checkpoint's."""
        return (
            values if self._order is None else torch.empty_like(values).index_copy_(-1, self._order, values)
        )

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        if name == "bias" and self._bias is not None:
            self._at(name)
            return self._bias.cpu()
        if name != "weight":
            raise OperatorError(
                f"int4_linear: found parameter {name}; allowed: {', '.join(self.parameter_shapes())}."
            )
        return self.codes().values().cpu()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        if self._native is None or dtype not in (torch.bfloat16, torch.float16):
            return self.codes().values().to(dtype)
        return self._as_stored(self._dequantise(dtype))

    def _dequantise(self, dtype: torch.dtype) -> Tensor:
        """The weight [n, k] of `dtype`, with inputs in the packed order."""
        out = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.config.device)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        self._native.dequantise(
            0, self.out_features, dtype == torch.float16, address("out", out, out.device), stream
        )
        return out

    def _is_unpacked(self, m: int) -> bool:
        """Whether the weight is unpacked and cuBLAS multiplies m tokens."""
        tested = self.sm80_only or self.every_lane or self.blocks is not None
        ours = tested or self._arch != "sm90"  # tests of kernels, or not measured
        k, n = self.in_features, self.out_features
        return m > self._many_tokens or (not ours and is_small(k, n, m) and not self._is_measured(m))

    def _is_copied(self, m: int, dtype: torch.dtype) -> bool:
        """Whether cuBLAS multiplies m tokens of a dtype by the copy."""
        return (
            self._copy is not None
            and dtype == self._copy.dtype
            and bf16_is_faster(self.in_features, self.out_features, m, self._multiprocessors)
        )

    def _is_measured(self, m: int) -> bool:
        """Whether m tokens have blocks on Hopper that were measured to be faster than all else."""
        return _native.int4_is_measured(self.out_features, self.in_features, m, self._multiprocessors)

    def multiply(self, x: Tensor) -> Tensor:
        if self._native is None:
            raise OperatorError(
                f"int4_linear: it computes on CUDA devices; this one is on {self.config.device}."
            )
        m = x.shape[0]
        if self._is_copied(m, x.dtype):
            assert self._copy is not None
            return functional.linear(x, self._copy, self._copy_bias)
        if self._order is not None:
            x = x[:, self._order]
        if self._is_unpacked(m):
            bias = None if self._bias is None else self._bias.to(x.dtype)
            return functional.linear(x, self._dequantise(x.dtype), bias)
        if x.data_ptr() % 16:
            x = x.clone()
        y = torch.empty(m, self.out_features, dtype=x.dtype, device=x.device)
        if m == 0:
            return y
        # Each call allocates its own scratch, so calls on several streams cannot share it. torch's caching allocator
        # makes that cheap.
        size, counters = self._native.scratch(m)
        assert counters <= self._counters.shape[1], "blocks for tests may need more than there are"
        partials = torch.empty(size, dtype=torch.uint8, device=x.device)
        self._turn = (self._turn + 1) % _TURNS
        self._native.forward(
            address("x", x, self._words.device, None, (m, self.in_features)),
            x.dtype == torch.float16,
            m,
            address("y", y, x.device),
            address("partials", partials, x.device),
            address("counters", self._counters[self._turn], x.device),
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        return y
