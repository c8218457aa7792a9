"""Arguments of `hybrid_experts` in a rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktinject.machine import canonical
from ktinject.operators.cpu_experts import CpuExpertsConfig

# Formats that have a kernel for experts on a GPU.
GPU_FORMATS = ("bf16", "int8", "int4", "fp8", "mxfp4", "fp8_channel", "nvfp4", "mxfp8", "q8_0")


@dataclass(frozen=True)
class HybridExpertsConfig(CpuExpertsConfig):
    """Arguments of `hybrid_experts` in a rule, beside those of `cpu_experts`."""

    # Experts of each layer on the GPU: a number, a share below 1, a profile, or auto: as many as the longest request
    # leaves room for, until somebody needs the memory
    gpu_experts: int | float | str = 0
    # The format of the experts on the GPU: that of weights where it has a kernel there, else bf16; or bf16, int4
    gpu_weights: Literal["same", "bf16", "int4"] = "same"
    profile: str | None = None  # a file of `ktinject profile`: its most used experts go to the GPU
    # Exchange experts on the GPU for those in use, while the model runs; auto: where gpu_experts is auto
    dynamic: bool | Literal["auto"] = "auto"
    # gpu: long prompts stream the experts through the GPU; a number: from so many tokens on; auto: the fastest.
    prefill: int | Literal["auto", "cpu", "gpu"] = "auto"
    # Whose links long prompts stream experts over: own: those of the layer's GPU; auto: of all GPUs that the model's
    # experts are on, where that was measured to be faster; a list: of the layer's GPU and these ones
    links: Literal["auto", "own"] | list[str] = "auto"
    # Whether experts on the GPU stay in RAM, too; false: they leave it while the model is loaded, and never move
    ram_copy: bool = True
    # How the GPU signals the CPU; auto: flags where they work
    handoff: Literal["auto", "flags", "host_func"] = "auto"
    # In captured steps, guess at a token's experts one layer ahead, for idle workers to read; false: never
    foresee: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.links, list):  # so that configs can be keys
            object.__setattr__(self, "links", tuple(canonical(name) for name in self.links))
        if not all(name.startswith("cuda:") for name in self.other_devices):
            raise ValueError(
                f"links is {list(self.links)}; a list names GPUs, as cuda:1. Name some, or write auto or own."
            )
        wanted = self.gpu_experts
        if isinstance(wanted, str) and wanted != "auto" and not wanted.endswith(".json"):
            raise ValueError(
                f"gpu_experts is {wanted!r}; allowed are a number, a share below 1, auto, and a profile (….json)."
            )
        if isinstance(wanted, float) and not 0 <= wanted <= 1:
            raise ValueError(
                f"gpu_experts is {wanted}; a share is between 0 and 1. Write a whole number, or a share."
            )
        if isinstance(wanted, int) and wanted < 0:
            raise ValueError(f"gpu_experts is {wanted}; allowed is 0 or more.")
        if isinstance(self.prefill, int) and self.prefill < 1:
            raise ValueError(
                f"prefill is {self.prefill}; allowed are auto, cpu, gpu, and the tokens, 1 or more, from which on "
                "prompts are streamed."
            )
        if self.profile is not None and isinstance(wanted, str) and wanted != "auto":
            raise ValueError("gpu_experts names a profile, and profile another one. Write one of them.")
        if self.profile is not None and wanted == 0:
            raise ValueError(
                "profile says which experts go to the GPU, and gpu_experts is 0. "
                "Write how many: auto, a number or a share."
            )
        if not self.ram_copy:
            self._check_without_copy()
        if self.dynamic is True and self.weights not in ("auto", "kept") and not self.copies_as_is:
            zeros = "" if self.symmetric else " with zero points"
            raise ValueError(
                f"dynamic copies experts as they are, but weights is {self.weights}{zeros} and gpu_weights "
                f"{self.gpu_weights}. Allowed is gpu_weights: same, with weights: {', '.join(GPU_FORMATS)}."
            )

    def _check_without_copy(self) -> None:
        if self.gpu_experts == 0:
            raise ValueError(
                "ram_copy: false takes experts on the GPU out of RAM, and gpu_experts is 0. Write how many: auto, a "
                "number, a share or a profile."
            )
        if self.dynamic is True:
            raise ValueError(
                "dynamic moves experts between RAM and the GPU, and ram_copy: false keeps those on the GPU there "
                "alone. Write one of them."
            )
        if self.weights not in ("auto", "kept") and not self.copies_as_is:
            raise ValueError(
                f"ram_copy: false moves experts to the GPU as they are, but weights is {self.weights} and gpu_weights "
                f"{self.gpu_weights}. Allowed is gpu_weights: same, with weights: {', '.join(GPU_FORMATS)}."
            )

    @property
    def gpu_format(self) -> str:
        """The format of the experts on the GPU; weights must be a format, not kept or auto."""
        if self.gpu_weights != "same":
            return self.gpu_weights
        if self.weights not in GPU_FORMATS or self.down_weights not in ("same", self.weights):
            return "bf16"
        return self.weights

    @property
    def copies_as_is(self) -> bool:
        """Whether experts on the GPU have the bytes of those in RAM."""
        # Experts that are packed for the GPU alone have no zero points.
        return self.gpu_format == self.weights and (self.symmetric or self.gpu_weights == "same")

    @property
    def moves(self) -> bool:
        """Whether the experts on the GPU are a cache."""
        wanted = self.gpu_experts == "auto" if self.dynamic == "auto" else self.dynamic
        return bool(wanted) and self.copies_as_is and self.ram_copy

    @property
    def other_devices(self) -> tuple[str, ...]:
        return () if isinstance(self.links, str) else tuple(self.links)

    @property
    def auto_sized(self) -> bool:
        return isinstance(self.gpu_experts, str) and self.device != "cpu"

    @property
    def gives_back(self) -> bool:
        return self.auto_sized and self.ram_copy

    @property
    def streams(self) -> bool:
        """Whether long prompts may stream experts through the GPU."""
        return self.device != "cpu" and self.prefill != "cpu"

    @property
    def streams_from(self) -> int | None:
        """Prompts of at least so many tokens are always streamed; None: streamed if that is faster, or never."""
        return self.prefill if isinstance(self.prefill, int) else {"gpu": 1}.get(self.prefill)
