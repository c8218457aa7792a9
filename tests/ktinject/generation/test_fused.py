"""Whole decode steps of few kernels against those of transformers' kernels, and what is left as it is."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from device_limits import pretended
from double import EXPERTS, Recorder
from test_generate import prompt, stock, swapped
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktinject
from ktinject.generation.cuda import fused
from ktinject.generation.cuda.fused_steps import LayerStep, connect
from ktinject.generation.layer_spec import NormSpec, PartSpec
from ktinject.operators.probes import twin
from ktinject.support import Support

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32},
    "deepseek_v3": {
        "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 32, "n_group": 4, "topk_group": 2,
        "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "qwen3_next": {  # of whose heads a quarter is rotated; with more experts than a submit chooses from
        "hidden_size": 64, "head_dim": 128, "moe_intermediate_size": 32, "num_experts": 288,
        "linear_key_head_dim": 32, "linear_value_head_dim": 64,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 64, "head_dim": 128, "moe_intermediate_size": 32,
        "linear_key_head_dim": 64, "linear_value_head_dim": 32,
    },
    "gpt_oss": {"hidden_size": 64, "head_dim": 32, "intermediate_size": 32, "sliding_window": 12},
    "qwen2_moe": {
        "hidden_size": 64, "num_attention_heads": 2, "moe_intermediate_size": 32, "sliding_window": 12,
        "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"],
    },
    "nemotron_h": {
        "hidden_size": 64, "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 64,
    },
    "granitemoehybrid": {
        "hidden_size": 64, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 128,
    },
    "lfm2_moe": {"hidden_size": 64},
}  # fmt: skip
LAYERS = 2  # of a tiny model
LATENT = {"name": "a", "match": {"path": r".*self_attn"}, "replace": {"operator": "absorbed_mla"}}


def layered(rules: Any, device: str = "cuda", family: str = "qwen3_moe", **config: Any) -> PreTrainedModel:
    """bf16, of sizes that the kernels of a whole layer serve."""
    model = models.tiny(family, **SIZES[family], **config).to(device, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # a rounding error must not decide the next token
    # With experts on the GPU, of which a tiny model has room for all, nothing would be handed to the CPU.
    variables = {"gpu_experts": 0} if rules == "auto" else None
    return ktinject.optimize(model, rules, progress=False, variables=variables)


def in_graphs_and_eagerly(rules: Any, batch: int, family: str = "qwen3_moe") -> tuple[list[Tensor], set[str]]:
    """What a model writes from one seed, and the paths that its graphs have kernels for.

    Returns  tokens [batch, n] and logits [steps, batch, vocabulary] in graphs, and both eagerly
    """
    found: list[Tensor] = []
    replaced: set[str] = set()
    for graphs in (True, False):
        model = layered(rules, family=family)
        if not graphs:
            model.ktinject_decoding.graphs = Support.no("for comparison")
        recorder = Recorder()
        arguments = {**prompt(batch, device="cuda"), "eos_token_id": None, "do_sample": True}
        torch.manual_seed(1)
        text = model.generate(**arguments, logits_processor=[recorder])
        assert model.ktinject_decoding.last.startswith("graph" if graphs else "stock")
        found += [text[:, arguments["input_ids"].shape[1] :], torch.stack(recorder.logits)]
        if graphs:
            assert not model.ktinject_decoding.fused.refused
            replaced = {*model.ktinject_decoding.fused._steps}
    return found, replaced


def assert_same_logits(
    ours: Tensor, logits: Tensor, theirs: Tensor, wanted: Tensor, allowed: float = 2e-2
) -> None:
    """As long as both write the same."""
    same = int((ours == theirs).all(0).int().cumprod(0).sum())
    assert same > (4 if allowed < 5e-2 else 2), "rounding takes longer to show"
    error = (logits[:same] - wanted[:same]).norm() / wanted[:same].norm()
    assert error < allowed, error


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("gpu_experts", [0, 3])
class TestLayersWithLatents:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(self, batch: int, gpu_experts: int) -> None:
        rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": gpu_experts}}, LATENT]
        found, replaced = in_graphs_and_eagerly(rules, batch, "deepseek_v3")
        assert {f"model.layers.{i}" for i in range(LAYERS)} <= replaced
        assert_same_logits(*found)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("gpu_experts", [0, 3])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
class TestLayersWithStates:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(
        self, batch: int, gpu_experts: int, family: str
    ) -> None:
        rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": gpu_experts}}]
        found, replaced = in_graphs_and_eagerly(rules, batch, family)
        assert {"model.layers.0", "model.layers.0.linear_attn", "model.layers.1"} <= replaced
        assert_same_logits(*found)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text", "qwen3_moe"])
@pytest.mark.parametrize(
    "linears", [r".*(attn\..*|lm_head)", r".*(in_proj_qkv|in_proj_qkvz|q_proj)"], ids=["all", "some"]
)
class TestLayersWithInt4:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(self, batch: int, family: str, linears: str) -> None:
        """Projections and the output layer by `int4_linear`; or some of a product's parts, and others of its own."""
        match = {"path": linears, "class": "Linear"}
        rules = [
            {**EXPERTS, "replace": {"operator": "hybrid_experts"}},
            {"name": "l", "match": match, "replace": {"operator": "int4_linear", "group_size": 32}},
        ]
        found, replaced = in_graphs_and_eagerly(rules, batch, family)
        assert {"model.layers.0", "model.layers.1"} <= replaced
        assert_same_logits(*found)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
class TestLayersWithWindows:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(self, batch: int, family: str) -> None:
        """Beyond the window; of gpt-oss with sinks, a router with a bias, and scores that transformers rounds."""
        rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts"}}]
        found, replaced = in_graphs_and_eagerly(rules, batch, family)
        assert {f"model.layers.{i}" for i in range(LAYERS)} <= replaced
        assert_same_logits(*found, allowed=6e-2 if family == "gpt_oss" else 2e-2)


@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize(
    "family, path",
    [
        ("nemotron_h", "model.layers.0.mixer"),
        ("granitemoehybrid", "model.layers.0.mamba"),
        ("lfm2_moe", "model.layers.1.conv"),
    ],
)
class TestMixersWithStates:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(self, batch: int, family: str, path: str) -> None:
        found, replaced = in_graphs_and_eagerly("auto", batch, family)
        assert path in replaced
        assert_same_logits(*found)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("gpu_experts", [0, 3])
@pytest.mark.parametrize("has_norms", [False, True])
class TestWholeLayers:
    pytestmark = gpu

    def test_logits_are_those_of_transformers_kernels(
        self, batch: int, gpu_experts: int, has_norms: bool
    ) -> None:
        """Step after step on the same text, with graphs of whole layers and eagerly."""
        rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": gpu_experts}}]
        if has_norms:
            path = r".*(layernorm|[qk]_norm|model\.norm)"
            rules.append({"name": "n", "match": {"path": path}, "replace": {"operator": "rms_norm"}})
        found, replaced = in_graphs_and_eagerly(rules, batch)
        assert {f"model.layers.{i}" for i in range(LAYERS)} <= replaced
        assert_same_logits(*found)

    def test_a_graph_gives_the_same_tokens_every_time(
        self, batch: int, gpu_experts: int, has_norms: bool
    ) -> None:
        rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": gpu_experts}}]
        model = layered(rules, num_hidden_layers=2 + has_norms)
        arguments = prompt(batch, device="cuda")
        first = model.generate(**arguments)
        for _ in range(5):
            assert torch.equal(model.generate(**arguments), first)
        assert model.ktinject_decoding.last == "graph loop"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
class TestWholeSteps:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [1, 3])
    def test_tokens_are_those_of_transformers_kernels(self, name: str, batch: int) -> None:
        size = {"head_dim": 32} if name == "qwen3_moe" else {}
        few, many = (swapped(name, device="cuda", **size) for _ in range(2))
        many.ktinject_decoding.fused = None
        arguments = prompt(batch, device="cuda")
        assert torch.equal(few.generate(**arguments), many.generate(**arguments))
        assert few.ktinject_decoding.last == many.ktinject_decoding.last == "graph loop"
        assert len(few.ktinject_decoding.fused) and not few.ktinject_decoding.fused.refused

    def test_a_module_that_computes_something_else_keeps_its_own(self, name: str) -> None:
        model = swapped(name, device="cuda")
        norm: Any = model.model.norm
        own = type(norm).forward
        members = {
            "forward": lambda self, x: own(self, x) + self.weight,
            "capturable": True,
            "__module__": __name__,
        }
        norm.__class__ = type("OddRMSNorm", (type(norm),), members)
        wanted = stock(model, **prompt(device="cuda"))
        assert torch.equal(model.generate(**prompt(device="cuda")), wanted)
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
        assert "model.norm" not in model.ktinject_decoding.fused._steps
        assert "model.layers.0.input_layernorm" in model.ktinject_decoding.fused._steps


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
class TestSmallerDevices:
    pytestmark = gpu
    rules = ({**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": 3}}, LATENT)

    @pytest.mark.parametrize("device", ["sm_86 RTX 3050", "sm_120 RTX 5090"])
    def test_all_kernels_can_be_launched(self, family: str, device: str) -> None:
        """With the limits of GPUs for consumers, where there is programmatic dependent launch and where not."""
        with pretended(device):
            found, replaced = in_graphs_and_eagerly(self._rules(family), 3, family)
            torch.cuda.synchronize()
        assert {f"model.layers.{i}" for i in range(LAYERS)} <= replaced
        assert_same_logits(*found)

    def test_what_cannot_be_launched_is_said(self, family: str, caplog: pytest.LogCaptureFixture) -> None:
        with (
            pretended("sm_120 RTX 5090", block_shared_bytes=49 << 10),
            caplog.at_level("WARNING", "ktinject"),
        ):
            model = layered(self._rules(family), family=family)
            model.generate(**prompt(1, device="cuda"))
            said = model.ktinject_decoding.explain(**prompt(1, device="cuda"))
            torch.cuda.synchronize()
        assert said.how == "graph loop"
        assert "bytes of shared memory, and this device allows 50176" in said.slower
        warned = [text for record in caplog.records if "this device allows" in (text := record.getMessage())]
        assert 1 <= len(warned) <= 3, "once a reason: of decode_linear, and of attention"

    def _rules(self, family: str) -> list[Any]:
        return list(self.rules[: 2 if family == "deepseek_v3" else 1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_layer_guesses_at_the_next_ones_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers whose experts take the CPU longer than a guess takes the GPU; tokens are the same without."""
    large = {"hidden_size": 512, "moe_intermediate_size": 2048, "num_hidden_layers": 4}
    monkeypatch.setitem(SIZES, "qwen3_moe", {**SIZES["qwen3_moe"], **large})
    texts = []
    for guesses in (True, False):
        rules: list[Any] = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "foresee": guesses}}]
        model = layered(rules)
        arguments = {**prompt(1, device="cuda"), "eos_token_id": None, "do_sample": False}
        texts += [model.generate(**arguments) for _ in range(2)]
        fused_model = model.ktinject_decoding.fused
        blocks = [step.routed for _, step in fused_model._steps.values() if getattr(step, "routed", None)]
        assert len(blocks) >= 2 and [block.next is None for block in blocks] == [False] * (
            len(blocks) - 1
        ) + [True]
        right, asked = model.ktinject_decoding.guesses()
        assert (asked > 0) == guesses and right <= asked
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_the_next_block_is_one_that_chooses_by_softmax() -> None:
    """Layers without a block, and other steps, stand between them."""

    def step(router: Any, norm: Any) -> LayerStep:
        return LayerStep(None, None, None, None, norm, SimpleNamespace(router=router, next=None))

    plain, grouped, last = step(None, "a"), step(object(), "b"), step(None, "c")
    dense = LayerStep(None, None, None, None, None, None)
    connect([plain, lambda x: x, grouped, dense, last])
    assert [one.routed.next for one in (plain, grouped, last)] == [None, (last.routed, "c"), None]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_model_itself_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of norms stand on a twin, which shares all else; without a GPU they compute what the norms do."""
    model = swapped(name)
    before = {path: {**vars(module)} for path, module in model.named_modules()}
    called: list[nn.Module] = []

    def step_of(spec: PartSpec, module: nn.Module, _: Tensor) -> Any:
        own = type(module).forward

        def step(x: Tensor) -> Tensor:
            called.append(module)
            return own(module, x) * (2 if module is found.twin.model.norm else 1)

        return step if isinstance(spec, NormSpec) else None

    monkeypatch.setattr(fused, "step_of", step_of)
    found = fused.Fused(model)
    ids = prompt()["input_ids"]
    with torch.no_grad():
        for _ in range(2):  # the first compares
            assert torch.equal(found(input_ids=ids).logits, model(input_ids=ids).logits)
    assert [*found.refused] == ["model.norm"] and "model.norm" not in found._steps
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    assert len(called) == 2 * norms - 1 and not {*map(id, called)} & {*map(id, model.modules())}
    for path, module in model.named_modules():
        assert {**vars(module)} == before[path] and "forward" not in vars(module)
    assert found.twin.model.layers[1].mlp.experts is model.model.layers[1].mlp.experts, "operators are shared"
    reference = weakref.ref(model)
    del model, module
    assert reference() is None, "a twin does not keep its model alive"


def test_known_modules_are_told_by_what_they_hold() -> None:
    names = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "gate", "norm", "rotary_emb"}
    qwen = fused.Fused(swapped("qwen3_moe"))
    assert {path.rpartition(".")[2] for path in qwen._steps} == names, "tensor cores would round fp32"
    half = fused.Fused(swapped("qwen3_moe", hidden_size=64).bfloat16())
    assert {path.rpartition(".")[2] for path in half._steps} == {*names, "self_attn", "0", "1"}
    states = fused.Fused(swapped("qwen3_next", **SIZES["qwen3_next"]).bfloat16())
    assert {"model.layers.0", "model.layers.0.linear_attn"} <= {*states._steps}
    assert "model.layers.0.linear_attn" not in fused.Fused(swapped("qwen3_next").bfloat16())._steps, "sizes"
    deepseek = fused.Fused(swapped("deepseek_v3"))
    assert {path.rpartition(".")[2] for path in deepseek._steps} == {
        "input_layernorm", "post_attention_layernorm", "q_a_layernorm", "kv_a_layernorm", "norm",
        "rotary_emb",
    }  # fmt: skip


def test_processes_refuse_the_same() -> None:
    """What one of several processes finds to differ, none replaces: parts exchange what they compute."""

    class Others:
        def all_support(self, support: Support) -> Support:
            return support and Support(not self.reason, self.reason)

    module, others = nn.Identity(), Others()
    found = fused.Fused(nn.Module(), others)
    for path, others.reason in (("alike", ""), ("differs there", "relative difference 0.1")):
        found._comparing(path, module, lambda x: x)(torch.ones(2))
    assert found.refused == {"differs there": "relative difference 0.1"}


def test_what_is_refused_is_a_warning_once_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that cannot be launched, and results that differ by more or by less: steps are slower for both."""
    model = swapped("qwen3_moe")
    broken = {"input_layernorm": "cannot be launched", "q_norm": "differs"}

    def step_of(spec: PartSpec, module: nn.Module, _: Tensor) -> Any:
        own = type(module).forward

        def step(x: Tensor) -> Tensor:
            path = next(path for path, other in found.twin.named_modules() if other is module)
            fault = broken.get(path.rpartition(".")[2])
            if fault == "cannot be launched":
                raise RuntimeError("asking for shared memory: invalid argument")
            return own(module, x) * (int(path.split(".")[2]) + 2 if fault else 1)

        return step if isinstance(spec, NormSpec) else None

    monkeypatch.setattr(fused, "step_of", step_of)
    found = fused.Fused(model)
    with torch.no_grad(), caplog.at_level("WARNING", "ktinject"):
        for _ in range(2):
            found(input_ids=prompt()["input_ids"])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert all("model.layers.0" in text and f"and {LAYERS - 1} more modules" in text for text in said)
    assert any("RuntimeError: asking for shared memory: invalid argument" in text for text in said)
    assert any("relative difference" in text for text in said)
    assert sorted(map(len, found.slower().values())) == [LAYERS, LAYERS] and len(found.refused) == 2 * LAYERS
    decoding = model.ktinject_decoding
    assert decoding.slower == "" == decoding.explain(**prompt()).slower, "no step is captured without a GPU"
    decoding.fused = found
    assert "model.layers.1.self_attn.q_norm: relative difference" in decoding.slower


def test_a_layer_that_only_follows_its_part_is_not_said_to_be_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = fused.Fused(nn.Module())
    found._layers = {"layers.3"}
    found.refused = {"layers.3.norm": "relative difference 0.1", "layers.3": "layers.3.norm does"}
    found._say_what_is_refused()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["layers.3.norm"]
    found._layers, found.refused = {"layers.4"}, {"layers.4": "relative difference 0.3"}
    found._say_what_is_refused()
    assert len(caplog.records) == 1, "said already, with another number"


def test_a_block_under_another_class_has_the_same_twins() -> None:
    """As `deferred_moe` has its block: no child, but the same children."""
    outer, inner = nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential()
    vars(inner)["_modules"] = outer._modules
    vars(outer)["_block"] = inner
    model = nn.ModuleList([outer, nn.Linear(2, 2)])
    found: Any = twin.tree(model, lambda module: isinstance(module, nn.ReLU))
    assert found[1] is model[1] and found[0] is not outer and found[0][1] is outer[1]
    assert type(found[0][0]) is nn.ReLU and found[0][0] is not outer[0]
    assert found[0]._block is not inner and found[0]._block[0] is found[0][0]
    found[0].register_forward_hook(lambda *_: None)
    assert not outer._forward_hooks and model[0] is outer and inner[0] is outer[0]
