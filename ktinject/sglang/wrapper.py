"""The object that SGLang hands the experts of one layer to, by the names that it knows.

    made       while SGLang builds the model
    load_weights(physical → logical)           once a layer, when the GPU has its experts
    submit_forward(x, ids, weights, stream)    then SGLang's own experts on the GPU, then
    sync_forward(x, stream)                    → [m, hidden], the CPU's part of the sum

In a process whose SGLang uses no experts on the CPU, nothing but this file, arguments.py and ranks.py is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ktinject.errors import OperatorError
from ktinject.sglang import arguments, ranks
from ktinject.sglang.arguments import Arguments

if TYPE_CHECKING:
    from ktinject.sglang.layer import Layer

_MOST_EXPERTS, _MOST_WIDTH, _MOST_LAYERS = 4096, 1 << 20, 1_000
_capture_sizes: list[int] = []
REFUSED: list[str] = []  # why this SGLang is not served, as the plug-in has found out


class KTMoEWrapper:
    """The routed experts of one layer that are on the CPU. Threads: one at a time, as SGLang calls it."""

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: Tensor | None = None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int | None = None,
        weight_path: str = "",
        chunked_prefill_size: int | None = None,
        *,
        num_gpu_experts: int | None = None,
        method: str = "AMXINT4",
        max_deferred_experts_per_token: int | None = 0,
        numa_nodes: Sequence[int] | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        **others: Any,
    ) -> None:
        """All by the names that SGLang and its fork give them; arguments.py says what they mean.

        chunked_prefill_size is a hint: a submit may have any number of tokens.

        Reads and allocates nothing yet, but for the buffers of a CUDA device that is torch's default device.
        Raises  OperatorError for arguments that are not known or make no sense, and for LoRA; CheckpointError for a
                weight_path that cannot be read
        """
        if REFUSED:
            raise OperatorError(
                f"{REFUSED[0]}. Install a SGLang that is known, or a ktinject that knows yours."
            )
        arguments.check_others(others)
        count, mask = arguments.placed(num_experts, num_gpu_experts, gpu_experts_mask)
        whole = arguments.whole
        limit, alpha = arguments.swiglu(swiglu_limit, swiglu_alpha, method)
        deferred = 0 if max_deferred_experts_per_token is None else max_deferred_experts_per_token
        self.arguments = Arguments(
            layer_idx=whole("layer_idx", layer_idx, 0, _MOST_LAYERS),
            num_experts=whole("num_experts", num_experts, 1, _MOST_EXPERTS),
            top_k=whole("num_experts_per_tok", num_experts_per_tok, 1, num_experts),
            hidden_size=whole("hidden_size", hidden_size, 1, _MOST_WIDTH),
            intermediate_size=whole("moe_intermediate_size", moe_intermediate_size, 1, _MOST_WIDTH),
            num_gpu_experts=count,
            mask=mask,
            threads=None
            if cpuinfer_threads is None
            else whole("cpuinfer_threads", cpuinfer_threads, 1, 4096),
            nodes=whole("threadpool_count", 64 if threadpool_count is None else threadpool_count, 1, 64),
            weight_path=str(weight_path or ""),
            method=arguments.method_of(method),
            method_name=str(method),
            deferred=whole("max_deferred_experts_per_token", deferred, 0, num_experts_per_tok),
            swiglu_limit=limit,
            swiglu_alpha=alpha,
            most_tokens=max(0, chunked_prefill_size or 0),
            share=ranks.mine() if mask is None else ranks.ALL,
        )
        # Here, not above: it imports the operators.
        from ktinject.sglang.layer import Layer

        self._layer: Layer = Layer(self.arguments, None if numa_nodes is None else [*numa_nodes])

    @property
    def layer_idx(self) -> int:
        """Number of the layer in the checkpoint."""
        return self.arguments.layer_idx

    @property
    def num_gpu_experts(self) -> int:
        """How many experts are on the GPU."""
        return self.arguments.num_gpu_experts

    @property
    def gpu_experts_mask(self) -> Tensor:
        """[num_experts] bool on the CPU: the experts on the GPU. What is written to it holds for later submits."""
        return self._layer.mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: Tensor) -> None:
        self._layer.mask.copy_(mask)

    def load_weights(self, physical_to_logical_map: Tensor | None = None) -> None:
        """Read and pack the experts of the CPU. May be called again, when the checkpoint has changed.

        physical_to_logical_map  [num_experts] int64: entry p is the expert of the checkpoint that belongs in place p
        Raises                   CheckpointError, OperatorError
        """
        self._layer.load(physical_to_logical_map)

    def describe(self) -> dict[str, Any]:
        """How the experts are packed and computed, in words: `weights`, `kernel` and more. Nothing before they are
        loaded."""
        return self._layer.describe()

    def load_weights_from_tensors(
        self, gate: Tensor, up: Tensor, down: Tensor, physical_to_logical_map: Tensor | None = None
    ) -> None:
        """Pack experts from memory: gate and up [experts, intermediate, hidden], down [experts, hidden, inter…]."""
        self._layer.load_tensors(gate, up, down, physical_to_logical_map)

    def submit_forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> None:
        """Hand work to the CPU, in the order of the stream; the host does not wait. `sync_forward` gives the result.

        Long prompts outside of graphs may pass through the GPU (prompts.py); then the host waits for the stream.

        hidden_states  [m, hidden] bfloat16, float16 or float32; may be overwritten afterwards, as all three
        topk_ids       [m, k] int32 or int64; negative ones, those from num_experts on and those on the GPU are skipped
        topk_weights   [m, k] float32, bfloat16 or float16
        cuda_stream    handle of the stream, also of one that is captured; None or 0: the current one
        Raises         OperatorError for a misfit, and for earlier failures where no plug-in takes them (failures.py)
        """
        self._layer.submit(hidden_states, topk_ids, topk_weights, cuda_stream)

    def sync_forward(self, hidden_states: Tensor, cuda_stream: int | None = None) -> Tensor:
        """The result of the submit: [m, hidden], of its dtype and device, ready in the order of the stream.

        Raises  OperatorError as `submit_forward`; on the CPU also for a failure of this submit
        """
        return self._layer.sync(hidden_states, cuda_stream)

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, cuda_stream: int | None = None
    ) -> Tensor:
        """`submit_forward` and `sync_forward`."""
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    @staticmethod
    def set_capture_batch_sizes(sizes: Sequence[int]) -> None:
        """The batch sizes that will be captured: a hint, and not needed, since submits of any size may be."""
        _capture_sizes[:] = [int(size) for size in sizes]

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """What `set_capture_batch_sizes` was given."""
        return [*_capture_sizes]

    @staticmethod
    def clear_buffer_cache() -> None:
        """Nothing: buffers belong to layers and graphs."""

    def submit_write_weight_scale_to_buffer(self, *_: Any, **__: Any) -> None:
        """Refused: the fork would copy packed weights to the GPU, and they are not packed as it needs them."""
        raise OperatorError(
            "KTMoEWrapper: SGLang's fork asks for the weights of a layer, to compute long prompts on the GPU; they are "
            "packed in another layout. Start it without --kt-gpu-prefill-token-threshold."
        )

    sync_write_weight_scale_to_buffer = submit_write_weight_scale_to_buffer


def generate_gpu_experts_masks(activation_freq: Tensor, num_gpu_experts: int) -> Tensor:
    """Which experts go to the GPU, by how often they are asked for.

    activation_freq  [layers, experts]
    num_gpu_experts  of all layers together
    Returns          [layers, experts] bool on the CPU: the most frequent ones of the whole model
    """
    counts = activation_freq.detach().to("cpu", torch.float64)
    chosen = torch.zeros(counts.shape, dtype=torch.bool, device="cpu")
    number = max(0, min(int(num_gpu_experts), counts.numel()))
    chosen.view(-1)[counts.flatten().topk(number).indices] = True
    return chosen
