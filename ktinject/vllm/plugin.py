"""vLLM's plug-in: vLLM calls `register` in each of its processes, by the entry point group `vllm.general_plugins`.

Also in those that serve models without it, so the experts are imported when a layer asks for them.

Source: vLLM 0.32.0, as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform
from vllm.version import __version__ as VERSION

from ktinject.errors import OperatorError
from ktinject.vllm import NAME

KNOWN = "0.32"


def register() -> None:
    """Let `--quantization ktinject` name our experts. May be called again."""
    register_quantization_config(NAME)(ExpertsConfig)


class ExpertsConfig(QuantizationConfig):
    """What `--quantization ktinject` stands for: experts by ExpertsMethod, all else as without it.

    Options by `--additional-config '{"ktinject": {"method": "AMXINT4", "threads": 16, "nodes": 2}}'`:

    method   how experts are packed, one of ktinject.sglang.arguments.METHODS
    threads  of the pool; none: all CPUs that vLLM leaves to the process
    nodes    NUMA nodes that weights are cut for, at most
    """

    def __init__(self) -> None:
        super().__init__()
        if not re.match(rf"{re.escape(KNOWN)}(\.|$)", VERSION):
            raise OperatorError(
                f"--quantization {NAME}: found vLLM {VERSION}; allowed is {KNOWN}, the one that this was run with. "
                "Install it, or a ktinject that knows yours."
            )
        if not current_platform.is_cpu():
            raise OperatorError(
                f"--quantization {NAME}: found the device {current_platform.device_name}; allowed: cpu. On GPUs with "
                "experts on the CPU, use SGLang with ktinject's plug-in, or `ktinject serve`."
            )

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExpertsConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from ktinject.vllm import experts

        return experts.method_of(layer)
