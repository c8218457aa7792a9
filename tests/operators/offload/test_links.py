"""Experts of a layer over the links of several GPUs: how they are dealt, when that pays, and the same results."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import expert_cases
import models
import pytest
import reference
import torch
from streaming_cases import EXPERTS, Bus, exact, filled, inputs, leaf, played_bus
from torch import Tensor, nn

from ktinject import env, measured
from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload import lent, links, one_link, prefill_rates, streaming
from ktinject.operators.offload.links import LinkRates, Links
from ktinject.operators.offload.ring import Ring

EQUAL = LinkRates(50e9, (50e9, 50e9), 400e9)
HOME, HELPER = torch.device("cpu"), torch.device("cpu", 1)  # of tests without a GPU


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    played_bus(monkeypatch)
    monkeypatch.setattr(links, "measure", lambda *_: EQUAL)
    return Bus.over


def linked(operator: CpuExperts, home: torch.device = HOME, helper: torch.device = HELPER) -> Any:
    layer = streaming.StreamedExperts(operator.spec, operator.native, home)
    layer.add_helper(helper)
    layer.linked = True
    return layer


# --- what is decided ---


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12, 128])
@pytest.mark.parametrize("shares", [(1.0,), (1, 1), (0.25, 0.75), (3, 2, 1), (0.0, 1.0)])
def test_each_expert_goes_over_one_link(count: int, shares: tuple[float, ...]) -> None:
    experts = [7 * expert for expert in range(count)]
    runs = links.deal(experts, shares)
    assert [expert for run in runs for expert in run] == experts and len(runs) == len(shares)
    for run, share in zip(runs, shares):
        assert abs(len(run) - count * share / sum(shares)) <= 1


def test_which_gpus_help() -> None:
    used = ["cuda:10", "cuda:0", "cuda:2", "cuda:0", "cpu"]
    assert links.of_argument("auto", "cuda:0", used) == ("cuda:2", "cuda:10")
    assert links.of_argument("auto", "cuda:0", ["cuda:0"]) == ()
    assert links.of_argument("own", "cuda:0", used) == links.of_argument("auto", "cpu", used) == ()
    assert links.of_argument(("cuda:0", "cuda:1"), "cuda:0", ["cuda:0"]) == ("cuda:1",)


def test_help_is_taken_where_it_pays() -> None:
    layer = LinkRates(50e9, (40e9, 30e9), 100e9).of_layer(1_200_000_000, 2048)
    assert layer.alone_s == pytest.approx(0.024) and layer.layer_s == pytest.approx(1.2 / 70)
    assert layer.shares == pytest.approx((4 / 7, 3 / 7)) and sum(layer.shares) == pytest.approx(1)
    assert layer.token_s == pytest.approx(2048 * 6 / 100e9)
    assert layer.pay(1024) and not layer.pay(32_768), "what crosses grows with the prompt"
    assert not layer.pay(1024, 0.1), "little is to be sent"
    small = LinkRates(50e9, (47e9, 47e9), 100e9).of_layer(1 << 28, 2048)
    assert not small.pay(1024), "what they spare is less than what help costs"
    assert not LinkRates(50e9, (25e9, 25e9), 1e15).of_layer(1 << 30, 2048).pay(128), "they share a bus"
    three = LinkRates(50e9, (50e9,) * 3, 100e9).of_layer(1 << 30, 2048)
    assert three.token_s == pytest.approx(2 * layer.token_s) and len(three.shares) == 3


def test_cpu_and_links_divide_the_experts() -> None:
    cpu_s = ((128, 0.0113), (512, 0.0151), (2048, 0.0305), (8192, 0.092))
    one = prefill_rates.Rates(0.022, cpu_s, gpu_s=((128, 0.001), (4096, 0.006)))
    free = Links(0.022, (0.022, 0.022), 0.0)
    both = one.over(free)
    assert both.bus_s == pytest.approx(0.011) and one.bus_s == 0.022
    saved = one.streamed_s(2048) - both.streamed_s(2048)
    assert saved == pytest.approx(0.011 - free.crossing_s(2048))
    assert 0 < one.passing(2048, 128) < both.passing(2048, 128) <= 128
    assert both.slowed[0] - 1 == pytest.approx(2 * (one.slowed[0] - 1)), (
        "twice as much is read beside the CPU"
    )
    dear = one.over(Links(0.022, (0.022, 0.022), 1e-5))
    assert dear.streamed_s(4096) - both.streamed_s(4096) == pytest.approx(4096e-5)
    assert dear.computed_s(4096) == both.computed_s(4096) == one.computed_s(4096)
    slow_gpu = prefill_rates.Rates(0.002, cpu_s, gpu_s=((128, 0.02), (4096, 0.02)))
    halved = slow_gpu.over(Links(0.002, (0.002, 0.002), 0.0))
    assert slow_gpu.streamed_s(512) - halved.streamed_s(512) == pytest.approx(0.01 - links._HELP_S)
    quarter = slow_gpu.streamed_s(512, 0.5) - halved.streamed_s(512, 0.5)
    assert quarter == pytest.approx(0.005 - links._HELP_S), "those on the GPU stay there"


def test_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert LinkRates.of_values(json.loads(json.dumps(EQUAL.values()))) == EQUAL
    for change in (
        {"alone": 0},
        {"crossing": math.inf},
        {"together": [1e9]},
        {"together": 3},
        {"alone": None},
    ):
        assert LinkRates.of_values({**EQUAL.values(), **change}) is None
    assert LinkRates.of_values({}) is None
    taken: list[int] = []
    monkeypatch.setattr(env, "settings", lambda: env.Settings(cache=tmp_path))
    monkeypatch.setattr(links, "_measure", lambda *_: taken.append(1) or EQUAL)
    source: Any = SimpleNamespace(packed_bytes=lambda count: 64 * count)

    def again(count: int = 5, devices: tuple[str, ...] = ("cuda:0", "cuda:1")) -> int:
        """How often it was measured in a process that begins now."""
        monkeypatch.setattr(links, "_rates", {})
        taken.clear()
        given = source, range(count), 256, [torch.device(device) for device in devices]
        assert links.measure(*given) == EQUAL == links.measure(*given)
        return len(taken)

    assert again() == 1 and again() == 0 and again(6) == 1 and again() == 0
    assert again(devices=("cuda:0", "cuda:1", "cuda:2")) == 1
    (file,) = (
        path for path in measured.folder().iterdir() if json.loads(path.read_text())["key"]["bytes"] == 384
    )
    good = json.loads(file.read_text())
    file.write_text(json.dumps(good | {"values": {**good["values"], "alone": -1.0}}))
    assert again(6) == 1 and again(6) == 0


def test_what_is_measured(bus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The own link alone, all at once, and what crosses; the fastest time counts, of one try for all links."""
    layer = linked(filled(256, 96))
    alone, together = iter((2.0, 1.0, 3.0)), iter(([1.0, 9.0], [4.0, 2.0], [5.0, 5.0]))

    def seconds(devices: list[torch.device], copy: Any) -> list[float]:
        for number in range(len(devices)):
            copy(number)
        return next(together) if len(devices) > 1 else [next(alone)]

    monkeypatch.setattr(links, "_seconds", seconds)
    monkeypatch.setattr(links, "_crossing_s", lambda own, others, hidden: 0.5 * len(others))
    found = links._measure(layer.source, range(3), 256, [HOME, HELPER])
    moved = links._CROSSING_TOKENS * 256 * (2 + 4)
    assert found == LinkRates(64 * 3 / 1.0, (64 * 3 / 4.0, 64 * 3 / 2.0), moved / 0.5)
    assert [experts for _, _, experts in bus] == [(0, 1, 2)] * 9
    asked: list[Any] = []
    monkeypatch.setattr(links, "measure", lambda *given: asked.append(given) or EQUAL)
    monkeypatch.setattr(links, "CHUNK_BYTES", 64 * 5 + 1)
    assert layer.links_for(100) is layer.links_for(4000) is not None
    assert asked == [(layer.source, (0, 1, 2, 3, 4), 256, [HOME, HELPER])], "once"


# --- what rules and plans say ---


def settled(count: int = 2, **arguments: Any) -> list[Any]:
    """What `plan_placement` settles for layers on so many GPUs, two on each."""
    modules = {
        f"layers.{layer}.experts": (
            leaf(256, 96),
            HybridExpertsConfig(device=f"cuda:{layer // 2}", **arguments),
        )
        for layer in range(2 * count)
    }
    return [*HybridExperts.plan_placement(nn.Module(), modules, {}).values()]


def test_all_gpus_with_experts_help_each_other() -> None:
    assert [one.helpers for one in settled()] == [("cuda:1",)] * 2 + [("cuda:0",)] * 2
    assert {one.helpers for one in settled(1)} == {()}
    assert (
        {one.helpers for one in settled(links="own")}
        == {one.helpers for one in settled(prefill="cpu")}
        == {()}
    )
    assert [one.helpers for one in settled(1, links=["cuda", "1"])] == [("cuda:1",)] * 2
    assert [one.helpers for one in settled(3)][2] == ("cuda:0", "cuda:2")
    with pytest.raises(ValueError, match=r"links is \['cpu'\]; a list names GPUs"):
        settled(links=["cpu"])


def test_an_operator_says_and_counts_who_helps() -> None:
    config = HybridExpertsConfig(device="cuda:1", prefill="gpu")
    operator = HybridExperts.build(leaf(256, 96), config)
    alone = operator.workspace()
    assert "links" not in operator.describe()["prefill"]
    operator.place(settled()[2])
    what = "the experts of long prompts"
    least, wanted = alone["cuda:1", what]
    assert operator.workspace() == {**alone, ("cuda:0", what): (0, wanted)} and least > 0
    assert operator.describe()["prefill"] == (
        "experts streamed to the GPU; over the links of cuda:0, cuda:1 where all of them are faster than one"
    )
    odd = HybridExperts.build(leaf(256, 33), HybridExpertsConfig(device="cuda:1"))
    odd.place(settled()[2])
    assert odd.helpers == (), "its experts cannot be streamed"
    idle = HybridExperts.build(leaf(256, 96), HybridExpertsConfig(device="cpu", links="own"))
    assert idle.describe()["handoff"].endswith("without effect: links=own")
    named = HybridExperts.build(leaf(256, 96), HybridExpertsConfig(device="cpu", links=["0"]))
    assert named.describe()["handoff"].endswith("without effect: links=['cuda:0']")


# --- the order of things, without a GPU ---


def test_each_link_carries_its_part(bus: list[Any]) -> None:
    operators = [filled(256, 96, seed) for seed in range(3)]
    layers = [linked(operator) for operator in operators]
    x, ids, weights = inputs(40, 256)
    for _ in range(2):
        bus.clear()
        for layer, operator in zip(layers, operators):
            found = layer.forward(x, ids, weights)
            assert found.dtype == x.dtype
            assert reference.relative_error(found, exact(operator, x, ids, weights)) < 0.01
            assert torch.equal(layer.forward(x, ids, weights), found), "always added up in one order"
        for device, halves in ((0, ((0, 1, 2, 3, 4), (5,))), (1, ((6, 7, 8, 9, 10), (11,)))):
            mine = [(native, experts) for link, native, experts in bus if link == device]
            # The second time of a layer, chunks of the next one are on their way, and are fetched again.
            assert {experts for _, experts in mine} == {*halves}
    bus.clear()
    for layer in layers:
        layer.forward(x, ids, weights)
    for device, halves in ((0, ((0, 1, 2, 3, 4), (5,))), (1, ((6, 7, 8, 9, 10), (11,)))):
        mine = [(native, experts) for link, native, experts in bus if link == device]
        assert mine == [(id(layer.native), half) for layer in layers for half in halves], "nothing in vain"


def test_one_link_and_two_give_the_same(bus: list[Any]) -> None:
    operator = filled(256, 96)
    layer, (x, ids, weights) = linked(operator), inputs(50, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = []
        for layer.linked in (False, True):
            bus.clear()
            found.append(layer.forward(x.to(dtype), ids.int(), weights.to(dtype)))
            assert {link for link, *_ in bus} == ({0, 1} if layer.linked else {0})
        assert found[0].dtype == found[1].dtype == dtype
        assert reference.relative_error(found[1], found[0]) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_help_by_what_was_measured(bus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    operator = filled(256, 96)
    x, ids, weights = inputs(40, 256)
    asked: list[tuple[int, float]] = []
    for pays in (False, True):
        monkeypatch.setattr(
            Links, "pay", lambda self, tokens, absent, pays=pays: asked.append((tokens, absent)) or pays
        )
        layer = linked(operator)
        layer.linked = None
        bus.clear()
        layer.forward(x, ids, weights)
        assert {link for link, *_ in bus} == ({0, 1} if pays else {0})
    assert asked == [(40, 1.0)] * 2
    monkeypatch.setattr(links, "measure", lambda *_: LinkRates(50e9, (50e9, 25e9), 400e9))
    layer = linked(operator)
    bus.clear()
    layer.forward(x, ids, weights)
    assert [sum(len(e) for link, _, e in bus if link == device) for device in (0, 1)] == [8, 4]


def test_parts_strangers_and_the_cpu_s_part(bus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    operator, (x, ids, weights) = filled(256, 96), inputs(50, 256)
    layer = linked(operator)
    layer.uses = torch.zeros(EXPERTS, dtype=torch.int64)
    whole = layer.forward(x, ids, weights)
    known = ids[(ids >= 0) & (ids < EXPERTS)]
    assert torch.equal(layer.uses, known.bincount(minlength=EXPERTS))
    monkeypatch.setattr(streaming, "ANSWER_BYTES", 2 * 4 * 256 * 7)
    assert torch.equal(layer.forward(x, ids, weights), whole)
    for stranger in (-2, EXPERTS + 1):
        wrong = ids.clone()
        wrong[20, 2] = stranger
        with pytest.raises(OperatorError, match=f"found {stranger}; allowed are 0 to {EXPERTS - 1}"):
            layer.forward(x, wrong, weights)
    assert torch.equal(layer.forward(x, ids, weights), whole)
    for passing in (7, 2, 1):
        bus.clear()
        found = layer.forward(x, ids, weights, passing, torch.float32)
        mine = torch.where(ids < passing, ids, -1)
        assert reference.relative_error(found, exact(operator, x, mine, weights)) < 0.01
        assert {e for _, _, experts in bus for e in experts} == {*range(passing)}, "in each of the parts"
    nothing = layer.forward(x, torch.full_like(ids, -1), weights)
    assert not nothing.any() and layer.forward(x[:0], ids[:0], weights[:0]).shape == (0, 256)


def test_biases_lie_on_each_device(bus: list[Any]) -> None:
    module = models.leaf(models.tiny("gpt_oss"))[1]
    operator = CpuExperts.build(module, CpuExpertsConfig(device="cpu"))
    operator.allocate()
    random = torch.Generator().manual_seed(0)
    for name, shape in operator.parameter_shapes().items():
        expert_cases.load(operator, name, torch.randn(shape, generator=random) * 0.1)
    operator.finish()
    layer = linked(operator)
    (helper,) = layer.helpers
    for mine, theirs in zip(layer._biases, helper._biases):
        assert mine.any() and torch.equal(mine, theirs)


def test_what_is_on_the_gpu_stays_there(bus: list[Any]) -> None:
    operators = [filled(256, 96, seed) for seed in range(2)]
    layers = [linked(operator) for operator in operators]
    x, ids, weights = inputs(40, 256)
    memory = torch.zeros(64 * EXPERTS, dtype=torch.uint8)
    places = [-1] * EXPERTS
    for place, expert in enumerate((1, 4, 5, 8)):
        places[expert], memory[64 * place] = place, expert
    for layer in layers:
        layer.here = one_link.Here(SimpleNamespace(), memory, lambda: places)  # type: ignore[arg-type]
    for count in (EXPERTS, 8):
        absent = [expert for expert in range(EXPERTS) if places[expert] < 0][: count - 4]
        half = len(absent) // 2
        for _ in range(2):
            bus.clear()
            for layer, operator in zip(layers, operators):
                found = layer.forward(x, ids, weights, count, torch.float32, places)
                passes = torch.isin(ids, torch.tensor([1, 4, 5, 8, *absent]))
                assert torch.equal(layer.passes(ids, count, places), passes)
                want = exact(operator, x, torch.where(passes, ids, -1), weights)
                assert reference.relative_error(found, want) < 0.01
            for device, mine in ((0, absent[:half]), (1, absent[half:])):
                for layer in layers:
                    sent = [
                        e
                        for link, native, es in bus
                        if (link, native) == (device, id(layer.native))
                        for e in es
                    ]
                    assert sent == mine, "once, in order"


def test_layers_of_two_homes_in_a_row(bus: list[Any]) -> None:
    """Each ring runs ahead into the layers of both."""
    operators = [filled(256, 96, seed) for seed in range(4)]
    homes = [(HOME, HELPER), (HOME, HELPER), (HELPER, HOME), (HELPER, HOME)]
    layers = [linked(operator, *at) for operator, at in zip(operators, homes)]
    arguments = inputs(40, 256)
    for turn in range(3):
        bus.clear()
        for layer, operator in zip(layers, operators):
            assert reference.relative_error(layer.forward(*arguments), exact(operator, *arguments)) < 0.01
        first, second = ((0, 1, 2, 3, 4), (5,)), ((6, 7, 8, 9, 10), (11,))
        for device in (0, 1):
            mine = [(native, experts) for link, native, experts in bus if link == device]
            want = []
            for layer in layers:
                own = (layer.ring.device.index or 0) == device
                want += [(id(layer.native), part) for part in (first if own else second)]
            assert mine == want, turn
    bus.clear()
    layers[0].forward(*arguments)
    assert {link for link, native, _ in bus if native == id(layers[1].native)} == {0, 1}
    for layer in layers:
        layer.linked = False
    bus.clear()
    for layer, operator in zip(layers, operators):
        assert reference.relative_error(layer.forward(*arguments), exact(operator, *arguments)) < 0.01
    # Of what ran ahead before, some was in vain; from then on each link carries its own layers alone.
    bus.clear()
    for layer in layers:
        layer.forward(*arguments)
    assert {(link, native) for link, native, _ in bus} == {
        (layer.ring.device.index or 0, id(layer.native)) for layer in layers
    }


def test_a_helper_without_room_is_left_out(
    bus: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operator, arguments = filled(256, 96), inputs(300, 256)
    want = exact(operator, *arguments)

    def without(found: Tensor, layer: Any) -> None:
        assert reference.relative_error(found, want) < 0.01 and not layer.helpers
        bus.clear()
        assert torch.equal(layer.forward(*arguments), found) and {link for link, *_ in bus} == {0}
        said = [record.message for record in caplog.records]
        where = "cpu:1: no room for the experts of long prompts of a layer on cpu"
        assert said == [f"{where}, which streams all of them itself"]
        caplog.clear()

    layer, reserve = linked(operator), Ring.reserve

    def full(self: Ring) -> None:
        if self.device == HELPER:
            raise torch.OutOfMemoryError("no room")
        reserve(self)

    with monkeypatch.context() as scarce:
        scarce.setattr(Ring, "reserve", full)
        without(layer.forward(*arguments), layer)
    layer = linked(operator)

    def no_room(self: Any, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as scarce:
        scarce.setattr(one_link.Routes, "to", no_room)
        without(layer.forward(*arguments), layer)
    layer = linked(operator)

    def cannot(*_: Any) -> LinkRates:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as scarce:
        scarce.setattr(links, "measure", cannot)
        without(layer.forward(*arguments), layer)


def test_where_the_layer_s_own_gpu_is_short_helpers_are_asked_again_next_time(
    bus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = filled(256, 96), inputs(300, 256)
    layer, real = linked(operator), torch.empty

    def scarce(*shape: Any, **how: Any) -> Tensor:
        if how.get("dtype") == torch.float32 and shape[0] == (300, 256):  # what is added up of two
            raise torch.OutOfMemoryError("no room")
        return real(*shape, **how)

    with monkeypatch.context() as short:
        short.setattr(torch, "empty", scarce)
        found = layer.forward(*arguments)
    assert reference.relative_error(found, exact(operator, *arguments)) < 0.01
    assert {link for link, *_ in bus} == {0} and layer.helpers
    layer.forward(*arguments)
    assert {link for link, *_ in bus} == {0, 1}


def test_memory_that_a_helper_has_lent_comes_back_first(
    bus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, arguments = filled(256, 96), inputs(300, 256)
    layer, reserve, is_lent = linked(operator), Ring.reserve, [True]

    def full(self: Ring) -> None:
        if self.device == HELPER and is_lent[0]:
            raise torch.OutOfMemoryError("no room")
        reserve(self)

    monkeypatch.setattr(Ring, "reserve", full)
    monkeypatch.setattr(lent, "is_lent", lambda devices: is_lent[0] and HELPER in devices)
    with pytest.raises(torch.OutOfMemoryError):
        layer.forward(*arguments)
    assert layer.helpers and layer.devices == {HOME, HELPER} and not layer.ring.lock.locked()
    is_lent[0] = False
    assert reference.relative_error(layer.forward(*arguments), exact(operator, *arguments)) < 0.01
    assert layer.helpers


def test_two_threads_whose_layers_help_each_other(bus: list[Any]) -> None:
    operators = [filled(256, 96, seed) for seed in range(2)]
    layers = [linked(operators[0], HOME, HELPER), linked(operators[1], HELPER, HOME)]
    arguments = inputs(40, 256)
    worst: list[float] = []

    def run(number: int) -> None:
        for _ in range(10):
            found = layers[number].forward(*arguments)
            worst.append(reference.relative_error(found, exact(operators[number], *arguments)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(worst) == 20 and max(worst) < 0.01
