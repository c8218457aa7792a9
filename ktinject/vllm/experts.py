"""The routed experts of vLLM's layers, as a quantisation that vLLM asks for them.

    made                            while vLLM builds the model: no parameters, the weights are not vLLM's
    load_weights                    vLLM hands over what it reads; experts are left to us, who read them packed
    process_weights_after_loading   the experts are read from the checkpoint and packed
    apply                           x, weights, ids → the sum of the experts, as one operator that torch.compile keeps

Source: vLLM 0.32.0, as published.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from ktinject.errors import CheckpointError, OperatorError, few, shown
from ktinject.sglang import KTMoEWrapper
from ktinject.vllm import NAME

log = logging.getLogger("vllm.ktinject")  # vLLM shows what is below "vllm"

_OPTIONS = ("method", "threads", "nodes")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def method_of(layer: torch.nn.Module) -> Any:
    """What computes a module: for routed experts ours, else what vLLM has without a quantisation."""
    if isinstance(layer, RoutedExperts):
        return ExpertsMethod(layer.moe_config)
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def options() -> dict[str, Any]:
    """What --additional-config says of ktinject. Raises OperatorError for what is not known."""
    given = get_current_vllm_config().additional_config
    found = given.get(NAME, {}) if isinstance(given, Mapping) else {}
    unknown = sorted(found.keys() - {*_OPTIONS}) if isinstance(found, Mapping) else [shown(found)]
    if unknown:
        raise OperatorError(
            f"--additional-config: {NAME}: found {', '.join(few(unknown))}; allowed: {', '.join(_OPTIONS)}."
        )
    return dict(found)


def check(layer: Any) -> int:
    """The number of the layer in the checkpoint. Raises OperatorError for what these experts do not compute."""
    config, name = layer.moe_config, layer.layer_name
    parallel = config.moe_parallel_config
    wrong = {
        f"--tensor-parallel-size {parallel.tp_size}": parallel.tp_size != 1,
        f"--data-parallel-size {parallel.dp_size}": parallel.dp_size != 1,
        "--enable-expert-parallel": parallel.use_ep,
        "experts that are there twice": config.num_experts != config.num_logical_experts,
        "--enable-lora": config.is_lora_enabled,
        "experts with biases": config.has_bias,
        f"the activation {layer.activation.value}": layer.activation.value != "silu",
        "a limit of the activation": (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta)
        != (None,) * 3,
        "weights that scale the input of the experts": layer.apply_router_weight_on_input,
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise OperatorError(
            f"--quantization {NAME}: {name}: found {', '.join(found)}, which is not served. "
            f"Leave it out, or serve this model without --quantization {NAME}."
        )
    number = _LAYER.search(name)
    if number is None:
        raise OperatorError(f"--quantization {NAME}: {name}: found no number of a layer in this name.")
    return int(number[1])


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Make the layer's object, which reads nothing yet. Raises OperatorError, CheckpointError."""
        index, config = check(layer), get_current_vllm_config()
        given = options()
        self.name = layer.layer_name
        self._is_loaded = False
        _tell_of_cpus()
        self._experts = KTMoEWrapper(
            layer_idx=index,
            num_experts=num_experts,
            num_experts_per_tok=layer.top_k,
            hidden_size=hidden_size,
            moe_intermediate_size=intermediate_size_per_partition,
            num_gpu_experts=0,
            cpuinfer_threads=given.get("threads"),
            threadpool_count=given.get("nodes"),
            weight_path=folder_of(config.model_config.model),
            chunked_prefill_size=config.scheduler_config.max_num_batched_tokens,
            method=given.get("method", "AMXINT4"),
        )
        layer.load_weights = self._skip

    def _skip(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """What vLLM reads of the experts. New weights for an engine that runs are refused: they would be lost."""
        if self._is_loaded:
            raise OperatorError(
                f"--quantization {NAME}: {self.name}: new weights for experts that are packed. Start vLLM again."
            )
        for _ in weights:
            pass
        return iter(())

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read and pack the experts. Raises CheckpointError, OperatorError."""
        if not self._is_loaded:
            self._experts.load_weights()
            self._is_loaded = True
            said = self._experts.describe()
            log.info(
                "%s: %s experts as %s, by %s",
                self.name,
                layer.global_num_experts,
                said["weights"],
                said["kernel"],
            )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """[m, hidden], the sum of each token's experts. Shared experts are vLLM's, who runs them beside this."""
        return _experts_of(x, topk_weights, topk_ids, self.name)

    def compute(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self._experts.forward(x, ids, weights)


@torch.library.custom_op(
    "ktinject::vllm_experts",
    mutates_args=(),
    schema="(Tensor x, Tensor weights, Tensor ids, str layer) -> Tensor",
)
def _experts_of(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    """The layer of the model that runs now: several may be in a process, with layers of the same names."""
    method: ExpertsMethod = get_forward_context().no_compile_layers[layer].routed_experts.quant_method
    return method.compute(x, weights, ids)


@_experts_of.register_fake
def _(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


def folder_of(model: str) -> str:
    """The checkpoint's folder: a path, or what a name on the Hub was downloaded to. Raises CheckpointError."""
    if os.path.exists(model):
        return model
    raise CheckpointError(
        f"--quantization {NAME}: {model}: there is no such folder. Download the model "
        f"(`hf download {model} --local-dir FOLDER`) and give its folder."
    )


_told = False


def _tell_of_cpus() -> None:
    """Warn, once, where a library has bound this thread to fewer CPUs than vLLM computes on."""
    global _told
    here, wanted = len(os.sched_getaffinity(0)), int(os.environ.get("OMP_NUM_THREADS") or 0)
    if here < wanted and not _told:
        log.warning(
            "experts run on %d CPUs, and vLLM on %d: OpenMP has bound this process to those. "
            "Start vLLM with VLLM_CPU_OMP_THREADS_BIND=nobind.",
            here,
            wanted,
        )
    _told = True
