"""vLLM's plug-in: vLLM calls `register` in each of its processes, by the entry point group `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Let `--quantization ktinject` name our experts. May be called again."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ktinject.vllm.experts import NAME, ExpertsConfig

    register_quantization_config(NAME)(ExpertsConfig)
