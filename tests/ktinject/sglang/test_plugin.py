"""SGLang's plug-in, with modules that stand for SGLang's: what is mended, and for which versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import prepared
import pytest
import sglang_cases
import torch
from sglang_cases import EXPERTS, arguments, expected, filled, inputs, is_near
from torch import Tensor

from ktinject.errors import OperatorError
from ktinject.operators.offload import streaming
from ktinject.sglang import KTMoEWrapper, combine, failures, layer, plugin, ranks, waiting, wrapper
from ktinject.sglang.ranks import Share, Where


@dataclass
class Config:
    activation: str = "silu"
    routed_scaling_factor: float | None = None


class Topk(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor | None = None


class Dispatched(NamedTuple):
    hidden_states: Tensor
    topk_output: Topk


class Combined(NamedTuple):
    hidden_states: Tensor


class OnGpu:
    """What has SGLang's experts: it computes ours, in fp64, and refuses ids of -1 and two routes in a row.

    ranks  of these processes, each has a part of the width
    """

    calls, ranks = 0, 1

    def apply(self, of: Any, dispatched: Dispatched) -> Combined:
        self.calls += 1
        x, topk = dispatched
        assert topk.topk_ids.shape[1] == 1 and (topk.topk_ids >= 0).all()
        return Combined((expected(x, topk.topk_ids, topk.topk_weights) / self.ranks).to(x.dtype))

    def create_moe_runner(self, of: Any, config: Config) -> None:
        self.config = config

    def create_weights(self, **_: Any) -> None:
        self.created = True


class Method:
    """As SGLang's KTEPWrapperMethod, without what is replaced."""

    def __init__(self, count: int, wrapper: KTMoEWrapper | None = None) -> None:
        self.gpu_method, self.num_gpu_experts, self.wrapper, self.tp_rank = OnGpu(), count, wrapper, 0
        self.kt_config = SimpleNamespace(num_gpu_experts=count, layer_idx=0)

    def create_weights(self, of: Any, num_experts: int) -> None:
        self.gpu_method.create_weights()
        if self.tp_rank == 0:
            self.wrapper = KTMoEWrapper(**arguments(num_gpu_experts=self.num_gpu_experts))

    def process_weights_after_loading(self, of: Any) -> None:
        raise AssertionError("it asks for CUDA")

    def create_moe_runner(self, layer: Any, moe_runner_config: Config) -> None:
        self.moe_runner_config = config = moe_runner_config
        self.gpu_method.create_moe_runner(layer, config)

    def apply(self, layer: Any, dispatch_output: Dispatched) -> Combined:
        raise AssertionError("it asks for CUDA")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Modules of SGLang's that were imported before the plug-in is."""
    made: dict[str, ModuleType] = {}

    def module(name: str, **values: Any) -> None:
        made[name] = ModuleType(f"sglang.srt.{name}")
        vars(made[name]).update(values)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", made[name])

    def config(server: Any, layer_idx: int) -> Any:
        return None if server is None else SimpleNamespace(layer_idx=layer_idx)

    def abort(message: str, status_code: int, err_type: str) -> Any:
        return SimpleNamespace(message=message, status_code=status_code)

    class Cache:
        size = 7

        def evictable_size(self) -> int:
            return self.size

        def evict(self, params: Any) -> None:
            self.size -= params.num_tokens

    class Scheduler:
        tree_cache = Cache()

        def process_batch_result(self, batch: Any, result: Any) -> str:
            return "processed"

    class Model(torch.nn.Module):
        def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
            return combine._within.tokens

    class ModelRunner:
        is_draft_worker = False
        model = Model()

        def load_model(self) -> Any:
            return made["layers.moe.kt_ep_wrapper"].create_kt_config_from_server_args(object(), 0)

        def forward(self, forward_batch: Any) -> bool:
            return layer._chain.is_on

    class FusedMoEWithLoRA:
        def __init__(self, base_layer: Any) -> None:
            self.base_layer = base_layer

    kind = type("KTEPWrapperMethod", (Method,), dict(vars(Method)))
    metadata_of = {"there": None}
    module(
        "layers.moe.kt_ep_wrapper",
        KTEPWrapperMethod=kind,
        create_kt_config_from_server_args=config,
        KTRANSFORMERS_AVAILABLE=False,
    )
    module("eplb.expert_location_dispatch", get_global_expert_location_metadata=lambda: metadata_of["there"])
    module("layers.moe.token_dispatcher", StandardCombineInput=Combined)
    module("managers.schedule_batch", FINISH_ABORT=abort)
    module(
        "mem_cache.base_prefix_cache", EvictParams=lambda num_tokens: SimpleNamespace(num_tokens=num_tokens)
    )
    module("managers.scheduler", Scheduler=Scheduler)
    module("model_executor.model_runner", ModelRunner=ModelRunner)
    module("model_executor.forward_batch_info", enable_num_token_non_padded=lambda: False)
    module("lora.layers", FusedMoEWithLoRA=FusedMoEWithLoRA)
    module("distributed.parallel_state")
    monkeypatch.setitem(sys.modules, "kt_kernel", ModuleType("kt_kernel"))
    monkeypatch.setattr(plugin, "_version", lambda name="sglang": (0, 5, 17) if name == "sglang" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(plugin, "_is_used", False)
    monkeypatch.setattr(plugin, "_has_ranks", False)
    sglang_cases.drop_failures()
    plugin._ending.clear()
    plugin._share.cache_clear()
    plugin.register()
    yield made
    ranks.take(ranks.ALL)
    plugin._share.cache_clear()
    wrapper.REFUSED.clear()
    sglang_cases.drop_failures()


def a_method(sglang: dict[str, ModuleType], count: int, factor: float | None = None) -> Any:
    made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(count, filled(num_gpu_experts=count))
    made.create_moe_runner(layer=None, moe_runner_config=Config(routed_scaling_factor=factor))
    return made


def test_the_module_that_sglang_knows_is_there(sglang: dict[str, ModuleType]) -> None:
    import kt_kernel  # type: ignore[import-not-found]

    assert kt_kernel.KTMoEWrapper is KTMoEWrapper and callable(kt_kernel.generate_gpu_experts_masks)
    assert sglang["layers.moe.kt_ep_wrapper"].KTMoEWrapper is KTMoEWrapper
    assert sglang["layers.moe.kt_ep_wrapper"].KTRANSFORMERS_AVAILABLE
    plugin.register()  # SGLang may call it again
    assert is_near(a_method(sglang, 0).apply(None, call()).hidden_states, expected(*inputs(5)))


def call(m: int = 5) -> Dispatched:
    x, ids, weights = inputs(m, ids=torch.int64)
    return Dispatched(x, Topk(weights, ids))


@pytest.mark.parametrize("found", [(0, 5, 10), (0, 6, 0)])
def test_another_version_is_refused_when_experts_are_asked_for(
    found: tuple[int, ...], sglang: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_version", lambda name="sglang": found if name == "sglang" else None)
    plugin.register()
    import kt_kernel

    kt_kernel.KTMoEWrapper.set_capture_batch_sizes([1])
    with pytest.raises(OperatorError, match=r"allowed are 0\.5\.11 to 0\.5\.23"):
        kt_kernel.KTMoEWrapper(**arguments())


def test_a_method_that_is_gone_is_seen(sglang: dict[str, ModuleType]) -> None:
    plugin.around(sglang["managers.scheduler"].Scheduler, "process_results", lambda original: None)
    with pytest.raises(OperatorError, match=r"this SGLang has no Scheduler\.process_results"):
        KTMoEWrapper(**arguments())


@pytest.mark.nightly
def test_what_the_page_installs_is_enough(tmp_path: Path) -> None:
    """In an environment without our other dependencies: SGLang wants another transformers than they do."""
    root = Path(__file__).parents[3]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", one)[0] for one in wanted}
    line = re.search(
        r"--no-deps \.\npip install (.*)\n", (root / "docs" / "how-to" / "sglang.md").read_text()
    )
    assert line is not None
    of_sglang = {"torch", "transformers", "safetensors"}
    absent = {{"pyyaml": "yaml"}.get(name, name) for name in names - of_sglang - {*line[1].split()}}
    code = f"""
import sys
sys.modules |= dict.fromkeys({sorted(absent)!r})  # cannot be imported, and not found either
from ktinject.sglang import plugin
plugin.register()
import transformers.modeling_utils
import ktinject.sglang.layer
print("here")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert absent and ran.stdout.endswith("here\n"), ran.stderr[-2000:]


def test_the_entry_point_is_the_function() -> None:
    points = metadata.entry_points(group="sglang.srt.plugins", name="ktinject")
    for point in points:  # none where the package was installed before there was one
        assert point.load() is plugin.register


@pytest.mark.parametrize("count", [0, 1, EXPERTS - 1])
@pytest.mark.parametrize("factor", [None, 2.5])
def test_both_parts_are_added_without_cuda(
    sglang: dict[str, ModuleType], count: int, factor: float | None
) -> None:
    """On a CPU the model class scales, and SGLang's kernels must not."""
    made = a_method(sglang, count, factor)
    assert made.moe_runner_config.routed_scaling_factor is None
    out = made.apply(layer=None, dispatch_output=call()).hidden_states  # by names, as SGLang
    assert is_near(out, expected(*inputs(5, ids=torch.int64)))
    assert made.gpu_method.calls == min(count, 1)


def test_the_sum_is_scaled_once_on_a_gpu(
    sglang: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model class where it does so, else here."""

    class Cuda(NamedTuple):
        is_cuda: bool = True

    ours = combine.Combine(sglang["layers.moe.kt_ep_wrapper"])
    made = SimpleNamespace(num_gpu_experts=1, ktinject_factor=2.5)
    dispatched = SimpleNamespace(hidden_states=Cuda())

    def original(*_: Any) -> Combined:
        return Combined(torch.ones(2))

    assert torch.equal(ours.apply(original, made, None, dispatched).hidden_states, torch.full((2,), 2.5))

    class DeepseekV2MoE:
        def forward(self) -> Tensor:
            return ours.apply(original, made, None, dispatched).hidden_states

    module = SimpleNamespace(DeepseekV2MoE=DeepseekV2MoE)
    monkeypatch.setitem(sys.modules, "sglang.srt.models.deepseek_v2", module)
    combine._watch_models()
    assert torch.equal(DeepseekV2MoE().forward(), torch.ones(2))


@pytest.mark.parametrize(
    "name, value",
    [
        ("is_gated", False),
        ("apply_router_weight_on_input", True),
        ("gemm1_alpha", 1.702),
        ("gemm1_clamp_limit", 7.0),
        ("swiglu_limit", 10.0),
    ],
)
def test_experts_that_compute_something_else_are_refused(
    sglang: dict[str, ModuleType], name: str, value: Any
) -> None:
    """gpt-oss, MiniMax-M3, Step-3.5, Llama 4: SGLang's own kernels are told of it, and the CPU is not."""
    made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(0, filled(num_gpu_experts=0))
    config = Config()
    for plain, default in (("is_gated", True), ("swiglu_limit", None), ("gemm1_clamp_limit", float("inf"))):
        setattr(config, plain, default)
    made.create_moe_runner(layer=None, moe_runner_config=config)
    setattr(config, name, value)
    with pytest.raises(OperatorError, match=f"{name} = {value}"):
        made.create_moe_runner(layer=None, moe_runner_config=config)


def test_weights_are_loaded_without_a_table_and_without_cuda(sglang: dict[str, ModuleType]) -> None:
    made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(0, KTMoEWrapper(**arguments()))
    made.process_weights_after_loading(None)
    made.create_moe_runner(None, Config())
    assert is_near(made.apply(None, call()).hidden_states, expected(*inputs(5)))


def test_draft_models_keep_their_experts(sglang: dict[str, ModuleType]) -> None:
    kind = sglang["model_executor.model_runner"].ModelRunner
    assert kind().load_model() is not None
    draft = kind()
    draft.is_draft_worker = True
    assert draft.load_model() is None
    assert kind().load_model() is not None


def test_only_decode_steps_defer(sglang: dict[str, ModuleType]) -> None:
    runner = sglang["model_executor.model_runner"].ModelRunner()

    def batch(decodes: bool) -> Any:
        return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decodes))

    assert runner.forward(batch(True)) and not runner.forward(batch(False)) and layer._chain.is_on


@pytest.mark.parametrize(
    ("several", "parts", "tokens", "others", "runs"),
    [
        (False, 1, 500, None, True),
        (True, 1, 127, None, True),
        (True, 1, 128, None, False),
        (True, 1, 128, [128, 9], True),
        (True, 2, 128, None, True),
    ],
)
def test_long_prompts_of_several_processes_run_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, several: bool, parts: int, tokens: int, others: Any, runs: bool
) -> None:
    class PrefillCudaGraphRunner:
        def capture_one_shape(self) -> None: ...

        def can_run_graph(self, forward_batch: Any) -> bool:
            return True

    module = ModuleType("runner")
    module.PrefillCudaGraphRunner = PrefillCudaGraphRunner  # type: ignore[attr-defined]
    plugin._mend_prefill(module)
    monkeypatch.setattr(plugin, "_is_used", True)
    monkeypatch.setattr(plugin, "_has_ranks", several)
    monkeypatch.setattr(ranks, "_mine", Share(0, parts))
    batch = SimpleNamespace(input_ids=torch.zeros(tokens), global_num_tokens_cpu=others)
    assert PrefillCudaGraphRunner().can_run_graph(batch) == runs
    assert plugin.LONG == streaming.FEWEST_TOKENS


def test_the_rows_that_are_tokens_are_known_within_a_pass(sglang: dict[str, ModuleType]) -> None:
    runner = sglang["model_executor.model_runner"].ModelRunner()
    runner.load_model()
    batch = SimpleNamespace(num_token_non_padded=3)
    assert runner.model.forward(0, 0, batch) == 3 and runner.model.forward(0, 0, forward_batch=batch) == 3
    assert combine._within.tokens is None


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_rows_that_several_ranks_bring_together_are_all_computed(
    sglang: dict[str, ModuleType], where: str
) -> None:
    """With --enable-dp-attention the number is of this rank's rows, and the experts get those of all."""
    runner = sglang["model_executor.model_runner"].ModelRunner()
    runner.load_model()
    batch = SimpleNamespace(**{"num_token_non_padded": 3, f"global_num_tokens_{where}": [3, 5]})
    assert runner.model.forward(0, 0, batch) is None


@pytest.mark.gpu
def test_rows_that_pad_a_graph_are_not_computed() -> None:
    made, (x, ids, weights) = filled(), inputs(8, device="cuda:0")
    tokens = torch.full((1,), 8, dtype=torch.int32, device="cuda:0")

    def run() -> Tensor:
        combine._within.tokens = tokens
        try:
            with combine._without_padding(x):
                made.submit_forward(x, ids, weights)
            return made.sync_forward(x)
        finally:
            combine._within.tokens = combine._within.live = None

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for count in (8, 5, 1, 7):
        tokens.fill_(count)
        graph.replay()
        want = expected(x, ids, weights)
        want[count:] = 0
        assert is_near(out, want)


def given_ranks(sglang: dict[str, ModuleType], places: Sequence[Where], rank: int) -> None:
    """This process is that rank of a group whose processes run there."""
    group = SimpleNamespace(
        world_size=len(places), rank_in_group=rank, all_gather_object=lambda mine: list(places)
    )
    sglang["distributed.parallel_state"].get_tp_group = lambda: group  # type: ignore[attr-defined]
    plugin._share.cache_clear()


def test_several_processes_of_experts_are_refused(sglang: dict[str, ModuleType]) -> None:
    def of(ep: int, tp: int) -> Any:
        return SimpleNamespace(moe_ep_size=ep, moe_tp_size=tp)

    made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(2)
    with pytest.raises(OperatorError, match="--ep-size 2"):
        made.create_weights(of(2, 1), num_experts=EXPERTS)
    assert not failures.are_kept()
    given_ranks(sglang, [ranks.here()] * 4, 0)
    with pytest.raises(OperatorError, match="--tp-size 4: of these processes, 2 share"):
        made.create_weights(of(1, 2), num_experts=EXPERTS)
    given_ranks(sglang, [ranks.here()] * 2, 0)
    made.create_weights(of(1, 2), num_experts=EXPERTS)
    assert not failures.are_kept()  # only one of two schedulers would end a request
    made.create_weights(of(1, 1), num_experts=EXPERTS)
    assert failures.are_kept()
    made.kt_config.num_gpu_experts = None
    with pytest.raises(OperatorError, match="--kt-num-gpu-experts: found None"):
        made.create_weights(of(1, 1), num_experts=EXPERTS)


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_wait_for_the_one_that_loads_the_experts(
    sglang: dict[str, ModuleType], processes: int
) -> None:
    """SGLang gives up 480 s after the first process has loaded, and most have no experts on the CPU to load."""
    loader = sglang["model_executor.model_runner"]
    loader.UNBALANCED_MODEL_LOADING_TIMEOUT_S = 480  # type: ignore[attr-defined]
    given_ranks(sglang, [ranks.here()] * processes, 0)
    made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(2)
    made.create_weights(SimpleNamespace(moe_ep_size=1, moe_tp_size=processes), num_experts=EXPERTS)
    found = loader.UNBALANCED_MODEL_LOADING_TIMEOUT_S
    assert found == 480 if processes == 1 else found >= 3600


def where(*cpus: int, machine: str = "a") -> Where:
    return Where(machine, frozenset(cpus))


@pytest.mark.parametrize(
    ("places", "want"),
    [
        ([where(0, 1)], [ranks.ALL]),
        ([where(0, 1)] * 3, [Share(0, 1, 2), Share(None), Share(None)]),
        ([where(0, 1), where(2, 3)], [Share(0, 2), Share(1, 2)]),
        ([where(0, 1), where(0, 1, machine="b")], [Share(0, 2), Share(1, 2)]),
        (  # two a node: one of each pair has the node's experts
            [where(0, 1), where(0, 1), where(2, 3), where(2, 3)],
            [Share(0, 2, 1), Share(None, 2), Share(1, 2, 1), Share(None, 2)],
        ),
        ([where(0), where(0, 1), where(1)], [Share(0, 2, 1), Share(None, 2), Share(1, 2, 1)]),
    ],
)
def test_processes_with_cpus_of_their_own_have_a_part_each(places: list[Where], want: list[Share]) -> None:
    found = ranks.shares(places)
    assert found == want
    held = [expert for share in found for expert in range(*share.of(3, 10))]
    assert held == [*range(3, 10)]  # each expert once


@pytest.mark.parametrize("count", [0, 3, EXPERTS - 1])
@pytest.mark.parametrize("places", [[where(0)] * 2, [where(0), where(1)], [where(0), where(1), where(1)]])
def test_the_sum_of_ranks_is_that_of_all_experts(
    sglang: dict[str, ModuleType], count: int, places: list[Where]
) -> None:
    """Each rank has a part of the width of the GPU's experts, and all, some or none of the CPU's experts."""
    total, held = torch.zeros(1), []
    for rank, share in enumerate(ranks.shares(places)):
        given_ranks(sglang, places, rank)
        made = sglang["layers.moe.kt_ep_wrapper"].KTEPWrapperMethod(count)
        made.tp_rank = rank
        made.create_weights(SimpleNamespace(moe_ep_size=1, moe_tp_size=len(places)), num_experts=EXPERTS)
        made.gpu_method.ranks = len(places)
        made.create_moe_runner(None, Config())
        made.process_weights_after_loading(None)
        assert (made.wrapper is None) == (share.part is None)
        held += [] if made.wrapper is None else [*made.wrapper.arguments.held]
        total = total + made.apply(None, call()).hidden_states
    assert held == [*range(count, EXPERTS)]
    assert is_near(total, expected(*inputs(5)))


RANK = """if True:
    import os, sys
    from types import ModuleType, SimpleNamespace
    import torch
    rank, bound, store = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
    sys.path[:0] = sys.argv[4:]
    if bound:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import sglang_cases
    from ktinject import _native
    from ktinject.sglang import KTMoEWrapper, plugin, ranks
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def gathered(mine):
        found = [None, None]
        torch.distributed.all_gather_object(found, mine)
        return found

    group = SimpleNamespace(world_size=2, rank_in_group=rank, all_gather_object=gathered)
    state = sys.modules["sglang.srt.distributed.parallel_state"] = ModuleType("parallel_state")
    state.get_tp_group = lambda: group

    class Method:
        kt_config, tp_rank, wrapper = SimpleNamespace(num_gpu_experts=3), rank, None

        def create_weights(self, layer, num_experts):
            if self.tp_rank == 0:
                self.wrapper = sglang_cases.filled(layer, num_gpu_experts=3)

    for number in range(2):
        method = Method()
        of = SimpleNamespace(moe_ep_size=1, moe_tp_size=2)
        plugin._create_weights(lambda self, of, **more: self.create_weights(number, **more), method, of, num_experts=8)
        for m in (1, 40):
            call = sglang_cases.inputs(m, number)
            out = torch.zeros(call[0].shape)
            if method.wrapper is not None:
                out += sglang_cases.forward(method.wrapper, call).float()
            torch.distributed.all_reduce(out)
            want = sglang_cases.expected(*call, layer=number, on_gpu={0, 1, 2})
            assert sglang_cases.is_near(out, want), (number, m)
    held = [] if method.wrapper is None else [*method.wrapper.arguments.held]
    print(held, _native.threads(), flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("bound", [False, True])
def test_two_processes_compute_a_layer(bound: bool, tmp_path: Path) -> None:
    """With CPUs of their own each has a part, else the first one has all."""
    sglang_cases.checkpoint()
    with ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(prepared.run, RANK, rank, bound, tmp_path / "store", *Path(__file__).parents[1:3])
            for rank in range(2)
        ]
        told = [one.result() for one in done]
    assert [one.returncode for one in told] == [0, 0], "".join(one.stderr for one in told)
    held = [one.stdout.split("]")[0] for one in told]
    assert held == (["[3, 4", "[5, 6, 7"] if bound else ["[3, 4, 5, 6, 7", "["])


def test_other_ranks_have_cpus_of_their_own(
    sglang: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(layer, "_threads", None)
    monkeypatch.setattr(layer._native, "threads", lambda: 16)
    monkeypatch.setattr(layer._native, "set_threads", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given_ranks(sglang, [ranks.here()] * 4, 0)
    ranks.take(plugin._share(4))
    for number in (0, 1):
        KTMoEWrapper(**arguments(number))
    assert asked == [13]
    KTMoEWrapper(**arguments(2, cpuinfer_threads=16))
    assert asked == [13, 16]


def test_adapters_on_experts_are_refused(sglang: dict[str, ModuleType]) -> None:
    kind = sglang["lora.layers"].FusedMoEWithLoRA
    kind(SimpleNamespace(quant_method=object()))
    with pytest.raises(OperatorError, match="LoRA on the experts of the CPU is not served"):
        kind(SimpleNamespace(quant_method=a_method(sglang, 0)))


def test_who_waits_for_a_step_sleeps(sglang: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own wait would spin."""
    left, asked, naps = [False, False, True], [], []
    event = SimpleNamespace(query=lambda: asked.append(1) or left.pop(0))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=naps.append))
    scheduler, batch = sglang["managers.scheduler"].Scheduler(), SimpleNamespace(reqs=[])

    def process() -> int:
        assert scheduler.process_batch_result(batch, SimpleNamespace(copy_done=event)) == "processed"
        return len(asked)

    assert process() == 0  # a model without experts on the CPU
    monkeypatch.setattr(plugin, "_is_used", True)
    assert process() == 3 and len(naps) == 2


def test_a_failure_ends_the_requests_that_may_have_seen_it(sglang: dict[str, ModuleType]) -> None:
    scheduler = sglang["managers.scheduler"].Scheduler()
    failures.keep()

    def process() -> list[Any]:
        batch = SimpleNamespace(reqs=[SimpleNamespace(to_finish=None) for _ in range(2)])
        assert scheduler.process_batch_result(batch, SimpleNamespace(copy_done=None)) == "processed"
        return [request.to_finish for request in batch.reqs]

    assert process() == [None, None] and scheduler.tree_cache.size == 7
    failures.note("layer 3: no answer")
    told = [*process(), *process()]  # this batch, and the one that had begun
    assert len(told) == 4 and all(
        end.status_code == 500 and "layer 3: no answer" in end.message for end in told
    )
    assert process() == [None, None] and scheduler.tree_cache.size == 0
