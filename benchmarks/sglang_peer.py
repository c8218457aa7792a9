"""kt-kernel's own kernels by the calls that SGLang makes: its submit and sync as published, over weights in memory.

Its constructor wants another argument than SGLang gives, and converted weights in files. So a layer is made by
moe_peers.py, and given to its class for the rest: the copies to the CPU, the host functions and the copy back are its.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from moe_peers import KtKernel, load_kt_kernel
from torch import Tensor

# --kt-method → its name, its class, and what it is given; see KtKernel.FORMATS.
FORMATS = {
    "AMXINT4": ("AMXINT4", "AMXInt4_MOE", "row"),
    "AMXINT8": ("AMXINT8", "AMXInt8_MOE", "row"),
    "BF16": ("BF16", "AMXBF16_MOE", "bf16"),
}


class KtContract:
    """kt-kernel's pool and its class for layers; raises ImportError where it is not installed."""

    def __init__(self, threads: int, tokens: list[int]) -> None:
        extension = load_kt_kernel()
        if extension is None:
            raise ImportError("kt-kernel is not installed")
        base = _published(extension)
        base.KExpertsCPUBuffer.capture_bs = [*tokens]  # graphs keep their buffers
        abstract = dict.fromkeys(base.BaseMoEWrapper.__abstractmethods__, _absent)
        self._class = type("Given", (base.BaseMoEWrapper,), abstract)
        self._pending = base.BaseMoEWrapper._layer_has_pending_deferred
        self.kernel = KtKernel(extension, threads)
        self.most = max(tokens)

    def layer(self, index: int, method: str, gate_up: Tensor, down: Tensor, top_k: int) -> Any:
        """A layer with submit_forward and sync_forward. gate_up [e, 2i, h], down [e, h, i] bf16."""
        packed = self.kernel.layer(FORMATS[method], gate_up, down, top_k, self.most)
        error = packed.error(gate_up, down)
        if error > 0.5:
            raise RuntimeError(f"{packed.name}: relative error {error:.2f}; it would be no fair comparison")
        made = self._class.__new__(self._class)
        made.layer_idx, made.num_experts, made.num_experts_per_tok = index, len(down), top_k
        made.hidden_size, made.moe_intermediate_size = down.shape[1:]
        made.chunked_prefill_size, made.max_deferred_experts_per_token = self.most, 0
        made.cpu_infer, made.moe, made.kept = self.kernel.pool, packed.moe, packed
        self._pending[index] = False
        return made


def take_over() -> None:
    """Let kt-kernel compute what SGLang gives ktinject's plug-in, in this process: layers of random weights, with all
    experts on the CPU.

    The plug-in keeps what it mends of SGLang for models without experts on the GPU. What only its own layers can do is
    left out: to choose experts within a submit, to guess at the next layer's, and to skip rows that pad a batch.
    """
    from ktinject.sglang import combine, guesses, routers, wrapper

    contracts: list[KtContract] = []

    def load(self: Any, _: Tensor | None = None) -> None:
        given = self.arguments
        with torch.device("cpu"):
            if not contracts:
                stands_in = sys.modules.pop("kt_kernel")  # the plug-in, by the name of what is looked for now
                # SGLang's graphs are of up to so many rows, and prompts of up to so many tokens.
                contracts.append(KtContract(len(os.sched_getaffinity(0)), [*range(1, 33), 2048]))
                sys.modules["kt_kernel"] = stands_in
            random = weights(given.num_experts, given.hidden_size, given.intermediate_size)
            self.peer = contracts[0].layer(given.layer_idx, given.method_name, *random, given.top_k)

    def plain(_: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    made: Any = wrapper.KTMoEWrapper
    made.load_weights = load
    made.submit_forward = lambda self, *given: self.peer.submit_forward(*given)
    made.sync_forward = lambda self, *given: self.peer.sync_forward(*given)
    combine._without_padding = plain
    routers.submit = lambda *_: False  # type: ignore[assignment]
    routers.leave_choices = guesses.connect = lambda _: None  # type: ignore[assignment]


def _absent(*_: Any) -> None:
    raise NotImplementedError


def _published(extension: ModuleType) -> ModuleType:
    """Its experts_base.py, without the package around it, which wants more."""
    spec = importlib.util.find_spec("kt_kernel")
    assert spec is not None and spec.submodule_search_locations is not None
    path = next(Path(folder) / "experts_base.py" for folder in spec.submodule_search_locations)
    package = ModuleType("kt_kernel")
    package.kt_kernel_ext = extension  # type: ignore[attr-defined]
    before = sys.modules.get("kt_kernel")
    sys.modules["kt_kernel"] = package
    try:
        found = importlib.util.spec_from_file_location("kt_experts_base", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["kt_kernel"]
        else:
            sys.modules["kt_kernel"] = before
    return module


def weights(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    """One random expert, seen as many: gate_up [e, 2i, h], down [e, h, i]."""
    gate_up = (torch.randn(1, 2 * inner, hidden) * hidden**-0.5).bfloat16()
    down = (torch.randn(1, hidden, inner) * inner**-0.5).bfloat16()
    return gate_up.expand(experts, -1, -1), down.expand(experts, -1, -1)
