"""SGLang's plug-in: SGLang calls `register` in each of its processes, by the entry point group `sglang.srt.plugins`.

It gives SGLang the module that it knows as kt_kernel, and mends what no module behind that name can. Nothing of SGLang
is imported here: what is mended is replaced as soon as SGLang itself has imported it.

    kt_ep_wrapper             the experts on the GPU are scaled once; none of them, or a CPU alone, needs no GPU kernel
    model_runner              a draft model keeps its experts; only decode steps defer; layers guess at the next, and
                              submits choose the experts
    runners of graphs         rows that only pad a batch ask for no expert, and long prompts may pass through the GPU
    scheduler                 a failure on the CPU ends the requests that were computed, not the server; who waits for a
                              step leaves its CPU to the experts
    lora.layers               adapters on experts are refused

Source: sglang 0.5.11 to 0.5.23, as published.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any

from ktinject.errors import OperatorError, shown
from ktinject.hf.on_import import when_imported
from ktinject.sglang import arguments, failures, graphs, ranks, waiting, wrapper
from ktinject.sglang.combine import Combine, watch_batches

log = logging.getLogger("ktinject")

OLDEST, NEWEST = (0, 5, 11), (0, 5, 23)
LONG = 128  # streaming.FEWEST_TOKENS, which is not imported in every process
_LOADING_S = 24 * 3600.0  # in which all processes must have loaded, from when the first one has
_LOADERS = "model_executor.model_runner_components.load_model_utils", "model_executor.model_runner"
_FORK = "sglang-kt"
_SRT = "sglang.srt"
_NAMES = ("KTMoEWrapper", "generate_gpu_experts_masks")


class _State(threading.local):
    """What this thread is about: building a draft model."""

    is_draft: bool = False


_state = _State()
_has_ranks = False  # other processes have a part of each layer
_is_used = False  # this process has layers with experts on the CPU
_ending: list[str] = []  # failures whose requests may be in the next batch, too


def register() -> None:
    """What the entry point names. May be called again."""
    version = _version()
    known = version is None or OLDEST <= version <= NEWEST
    _stand_in(wrapper.KTMoEWrapper)
    wrapper.REFUSED.clear()
    if not known:  # SGLang without experts on the CPU works as ever
        oldest, newest, found = (".".join(map(str, numbers)) for numbers in (OLDEST, NEWEST, version or ()))
        wrapper.REFUSED.append(f"SGLang {found}: allowed are {oldest} to {newest}")
    if not known or _version(_FORK) is not None:  # the fork has mended its own
        return
    for name, mend in _MENDS.items():
        when_imported(f"{_SRT}.{name}", functools.partial(_mend, f"{_SRT}.{name}", mend))


def _version(name: str = "sglang") -> tuple[int, ...] | None:
    """The first three numbers of an installed version; None if it is not installed or says nothing."""
    try:
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
    return tuple(map(int, found.groups())) if found else None


def _stand_in(made: type) -> None:
    """Answer to `import kt_kernel`, also where it was asked for already."""
    module = ModuleType("kt_kernel", "ktinject's experts on the CPU, by the name that SGLang knows.")
    values = {"KTMoEWrapper": made, "generate_gpu_experts_masks": wrapper.generate_gpu_experts_masks}
    vars(module).update(values, __version__="ktinject", __cpu_variant__="ktinject")
    other = sys.modules.get("kt_kernel")
    if other is not None and getattr(other, "__version__", "") != "ktinject":
        log.warning("kt_kernel was imported before ktinject's plug-in, which takes its place.")
    sys.modules["kt_kernel"] = module
    for name, holder in [*sys.modules.items()]:
        if name.startswith(f"{_SRT}.") and "KTRANSFORMERS_AVAILABLE" in vars(holder):
            vars(holder).update(
                {key: values[key] for key in _NAMES if key == "KTMoEWrapper" or key in vars(holder)}
            )
            vars(holder)["KTRANSFORMERS_AVAILABLE"] = True


def _mend(name: str, mend: Callable[[ModuleType], None]) -> None:
    module = sys.modules[name]
    if not hasattr(module, "ktinject_mended"):
        mend(module)
        module.ktinject_mended = True  # type: ignore[attr-defined]


def around(holder: Any, name: str, hook: Callable[..., Any]) -> None:
    """Put `hook(original, *args, **kwargs)` in place of a function. Where there is none, no experts are served."""
    original = vars(holder).get(name)
    if original is None:
        wrapper.REFUSED.append(f"this SGLang has no {holder.__name__}.{name}, which would have to be mended")
        return
    if hasattr(original, "ktinject"):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    replaced.ktinject = True  # type: ignore[attr-defined]
    setattr(holder, name, replaced)


# --- which models, which passes ---


def _mend_wrapper(module: ModuleType) -> None:
    around(module, "create_kt_config_from_server_args", _config)
    method = module.KTEPWrapperMethod
    combine = Combine(module)
    around(method, "create_weights", _create_weights)
    for name in ("process_weights_after_loading", "create_moe_runner", "apply"):
        around(method, name, getattr(combine, name))


def _mend_layer(module: ModuleType) -> None:
    around(module, "create_kt_config_from_server_args", _config)


def _config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A draft model has no experts in --kt-weight-path, and few layers: all of them stay on the GPU."""
    global _is_used
    config = None if _state.is_draft else original(*args, **kwargs)
    _is_used = _is_used or config is not None
    return config


def _create_weights(original: Callable[..., Any], self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    if (size := getattr(layer, "moe_ep_size", 1)) > 1:
        raise OperatorError(
            f"--ep-size {size}: experts on the CPU are asked for by the numbers of one process's experts. "
            "Start SGLang with --ep-size 1."
        )
    given = self.kt_config.num_gpu_experts
    arguments.placed(kwargs.get("num_experts", args[0] if args else 0), given, None)
    global _has_ranks
    processes = getattr(layer, "moe_tp_size", 1)
    _has_ranks = processes > 1
    ranks.take(_share(processes))
    if _has_ranks:
        _wait_for_loading()
    if ranks.mine().part is not None:
        self.tp_rank = 0  # by which SGLang knows the process that it asks
    # The schedulers of several processes must end the same requests in the same step, and only one of them would know.
    if processes == 1 and not _has_stages():
        failures.keep()
    return original(self, layer, *args, **kwargs)


@functools.cache
def _share(processes: int) -> ranks.Share:
    """This process's share of each layer. The first time, with several processes, it asks the others where they run."""
    if processes == 1:
        return ranks.ALL
    import torch

    group = sys.modules[f"{_SRT}.distributed.parallel_state"].get_tp_group()
    if group.world_size != processes:
        raise OperatorError(
            f"--tp-size {group.world_size}: of these processes, {processes} share each layer's experts, and experts on "
            "the CPU are for all of them. Start SGLang with --moe-dp-size 1."
        )
    share = ranks.shares(group.all_gather_object(ranks.here()))[group.rank_in_group]
    if share.parts > 1:
        log.info("experts on the CPU: part %s of %d, for this process's CPUs", share.part, share.parts)
    # Without CUDA, those that wait sleep.
    return share if torch.cuda.is_available() else share._replace(beside=0)


def _wait_for_loading() -> None:
    """Let processes without experts on the CPU wait for the one that packs them all. SGLang ends after 480 s."""
    for name in _LOADERS:
        module = sys.modules.get(f"{_SRT}.{name}")
        found = getattr(module, "UNBALANCED_MODEL_LOADING_TIMEOUT_S", None)
        if isinstance(found, int | float) and found < _LOADING_S:
            vars(module)["UNBALANCED_MODEL_LOADING_TIMEOUT_S"] = _LOADING_S


def _has_stages() -> bool:
    """Whether there is pipeline parallelism."""
    state = sys.modules.get(f"{_SRT}.distributed.parallel_state")
    group = getattr(state, "_PP", None)
    return group is not None and group.world_size > 1


def _mend_model_runner(module: ModuleType) -> None:
    around(module.ModelRunner, "load_model", _load_model)
    around(module.ModelRunner, "forward", _forward)


def _load_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    before, _state.is_draft = _state.is_draft, bool(getattr(self, "is_draft_worker", False))
    try:
        out = original(self, *args, **kwargs)
        if _is_used and not _state.is_draft:
            watch_batches(self.model)
            # Here, not above: it imports the operators, and layers of this model have done so by now.
            from ktinject.sglang import guesses, routers

            guesses.connect(self.model)
            routers.leave_choices(self.model)
        return out
    finally:
        _state.is_draft = before


def _forward(original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    mode = getattr(forward_batch, "forward_mode", None)
    with _deferring(mode is None or mode.is_decode()):
        return original(self, forward_batch, *args, **kwargs)


@contextmanager
def _deferring(is_on: bool) -> Iterator[None]:
    layer = sys.modules.get("ktinject.sglang.layer")
    if layer is None:
        yield
        return
    layer.defers(is_on)
    try:
        yield
    finally:
        layer.defers(True)  # as graphs of decode steps are captured


# --- graphs ---


def _mend_padding(module: ModuleType) -> None:
    if hasattr(module, "enable_num_token_non_padded"):  # without it, rows that pad are computed, too
        around(module, "enable_num_token_non_padded", _masks_padding)


def _masks_padding(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """SGLang then says how many rows of a graph are tokens, which `combine.py` asks for."""
    import torch

    return (_is_used and torch.cuda.is_available()) or original(*args, **kwargs)


def _mend_prefill(module: ModuleType) -> None:
    _mend_padding(module)
    for runner, capture in (
        ("PrefillCudaGraphRunner", "capture_one_shape"),
        ("PiecewiseCudaGraphRunner", "capture_one_batch_size"),
        ("BreakableCudaGraphRunner", "_capture_one"),
    ):
        if hasattr(module, runner):
            around(getattr(module, runner), capture, _capture_prefill)
            for name in ("can_run_graph", "can_run"):
                if name in vars(getattr(module, runner)):
                    around(getattr(module, runner), name, _runs_prefill)


def _capture_prefill(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _deferring(False):
        return original(*args, **kwargs)


def _runs_prefill(
    original: Callable[..., Any], self: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Graphs of several processes are not cut, so long prompts of theirs run without, where the experts of the first
    one may pass through its GPU. All of them have the same batch, unless attention is of several ranks with their own,
    who agree on their graphs in another way."""
    if (
        _has_ranks
        and _is_used
        and ranks.mine().parts == 1
        and getattr(forward_batch, "global_num_tokens_cpu", None) is None
        and len(forward_batch.input_ids) >= LONG
    ):
        return False
    return original(self, forward_batch, *args, **kwargs)


# --- failures ---


def _mend_scheduler(module: ModuleType) -> None:
    around(module.Scheduler, "process_batch_result", _process)


def _process(
    original: Callable[..., Any], self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """End the requests of a batch during which the CPU failed, and of the next one, which may have begun by then."""
    if _is_used:
        _await(result)
    layer = sys.modules.get("ktinject.sglang.layer")
    if layer is None or not failures.are_kept():
        return original(self, batch, result, *args, **kwargs)
    layer.check_layers()
    found = failures.take()
    told, _ending[:] = found or [*_ending], found
    if told:
        log.error("experts on the CPU failed, and %d requests are ended: %s", len(batch.reqs or ()), told[0])
        _end(batch, told[0])
    out = original(self, batch, result, *args, **kwargs)
    if told:
        _forget_prefixes(self.tree_cache)
    return out


def _await(result: Any) -> None:
    """Until what the batch has computed is here: before, nobody knows whether it failed."""
    import torch

    copied = getattr(result, "copy_done", None)
    if copied is None and torch.cuda.is_available():
        copied = torch.cuda.Event()
        copied.record()
    if copied is not None:
        waiting.until(copied)


def _end(batch: Any, text: str) -> None:
    schedule = sys.modules[f"{_SRT}.managers.schedule_batch"]
    for request in batch.reqs or ():
        request.to_finish = schedule.FINISH_ABORT(
            f"The experts on the CPU failed: {text}", status_code=500, err_type="InternalServerError"
        )
        request.skip_radix_cache_insert = True  # what it left in the cache is NaN


def _forget_prefixes(cache: Any) -> None:
    """Drop all prefixes that no request uses: a part of a prompt that was ended may be among them."""
    common = sys.modules[f"{_SRT}.mem_cache.base_prefix_cache"]
    try:
        size = cache.evictable_size()
        if isinstance(size, int) and size > 0:
            cache.evict(common.EvictParams(num_tokens=size))
    except NotImplementedError:
        log.warning("prefixes of %s cannot be dropped; flush the cache (/flush_cache).", type(cache).__name__)


# --- LoRA ---


def _mend_lora(module: ModuleType) -> None:
    if hasattr(module, "FusedMoEWithLoRA"):
        around(module.FusedMoEWithLoRA, "__init__", _lora)


def _lora(original: Callable[..., Any], self: Any, base_layer: Any, *args: Any, **kwargs: Any) -> Any:
    if type(getattr(base_layer, "quant_method", None)).__name__ == "KTEPWrapperMethod":
        raise OperatorError(
            f"--lora-target-modules: {shown('experts')}: {arguments.NO_LORA} Adapters on other modules are served."
        )
    return original(self, base_layer, *args, **kwargs)


def _mend_breakable(module: ModuleType) -> None:
    """Graphs of long prompts may be cut at experts, too. Where they cannot, the CPU computes these prompts.

    At each cut the processes of all ranks wait for each other, and only the first one has experts on the CPU.
    """
    cut, current = getattr(module, "eager_on_graph", None), getattr(module, "_current_capture_var", None)
    if cut is not None and current is not None:
        graphs.cuts_by(cut(True), lambda: not _has_ranks and current.get() is not None)


_MENDS: dict[str, Callable[[ModuleType], None]] = {
    "layers.moe.kt_ep_wrapper": _mend_wrapper,
    "layers.moe.fused_moe_triton.layer": _mend_layer,
    "model_executor.model_runner": _mend_model_runner,
    "model_executor.forward_batch_info": _mend_padding,
    "model_executor.cuda_graph_runner": _mend_padding,
    "model_executor.runner.base_runner": _mend_padding,
    "model_executor.runner.decode_cuda_graph_runner": _mend_padding,
    "model_executor.runner.prefill_cuda_graph_runner": _mend_prefill,
    "model_executor.piecewise_cuda_graph_runner": _mend_prefill,
    "model_executor.breakable_cuda_graph_runner": _mend_prefill,
    "model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph": _mend_breakable,
    "model_executor.breakable_cuda_graph.breakable_cuda_graph": _mend_breakable,
    "managers.scheduler": _mend_scheduler,
    "lora.layers": _mend_lora,
}
