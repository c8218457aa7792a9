"""What the page asks for: the plan as a picture, which experts are used, and where a decode step's time goes."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from trained import trained_model

import ktinject
from ktinject import _native
from ktinject.serving import activity, page, picture
from ktinject.serving.activity import Activity

torch.set_num_threads(1)


@functools.cache
def loaded() -> Any:
    return ktinject.load(trained_model("tiny-deepseek-v3"), devices="cpu", progress=False)


def test_the_picture_of_a_plan() -> None:
    found = picture.of_model(loaded(), {"model": "tiny"})
    dense, first, *_ = found["layers"]
    assert found["model"] == "tiny" and len(found["layers"]) == loaded().config.num_hidden_layers
    assert dense["experts"] is None and "absorbed_mla" in dense["operators"]
    assert first["experts"] == {
        "count": loaded().config.n_routed_experts,
        "operator": "hybrid_experts",
        "weights": "bf16",
        "kernel": first["experts"]["kernel"],
        "on_gpu": [],
    }
    (device,) = found["devices"]
    assert device["name"] == "cpu" and device["weights"] == loaded().ktinject.bytes["cpu"] < device["limit"]


def chosen_by_routers(model: Any, ids: torch.Tensor, steps: int) -> dict[int, list[int]]:
    """How often each layer's router chooses each expert, in steps as the model itself makes them."""
    counts: dict[int, torch.Tensor] = {}

    def hook(layer: int, module: Any, args: Any) -> None:
        one = args[1].flatten().bincount(minlength=module.num_experts)
        counts[layer] = counts.get(layer, 0) + one

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(functools.partial(hook, i))
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "experts")
    ]
    try:
        model.generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=None)
    finally:
        for one in hooks:
            one.remove()
    return {layer: count.tolist() for layer, count in counts.items()}


def test_uses_are_those_of_the_routers_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "IDLE_S", 600)
    model, ids = loaded(), torch.arange(40, 50)[None]
    wanted: dict[int, list[int]] = {}
    write = functools.partial(model.generate, ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    found = Activity(model, lambda: {"running": 0})
    assert not found.is_looked_at

    async def look() -> None:
        before = await found.answer()
        assert before["running"] == 0 and before["step"] is None and before["cache"] is None
        assert not any(map(any, before["uses"].values()))
        wanted.update(chosen_by_routers(model, ids, 12))
        assert (await found.answer())["uses"] == wanted
        write()  # the first native steps are compared with the model's own: both compute
        before = await found.answer()
        write()
        now = await found.answer()
        assert model.ktinject_decoding.last == "native loop"
        for layer, counts in wanted.items():  # native steps choose otherwise where scores are nearly equal
            native = [b - a for a, b in zip(before["uses"][layer], now["uses"][layer])]
            assert sum(native) == sum(counts)
            assert sum(abs(n - w) for n, w in zip(native, counts)) <= 0.2 * sum(counts)
        step = now["step"]
        assert step["device"] == "cpu" and step["rows"] == 1 and step["handoff"] is None and step["steps"] > 4
        assert step["cpu_experts"] + step["rest"] == pytest.approx(step["seconds"], rel=1e-6)
        assert [layer for layer, *_ in step["latest"]] == sorted(wanted)
        monkeypatch.setattr(activity, "IDLE_S", 0.01)
        found._lapse()
        while found.is_looked_at:
            await asyncio.sleep(0.01)

    asyncio.run(look())
    counted = _native.uses()
    write()
    assert _native.trace_stop() == [] and _native.uses() == counted, "nobody looked any more"


def test_steps_are_told_from_prompts_and_from_parts() -> None:
    def spans(start: int, tokens: int = 1, layers: int = 3) -> list[activity.Span]:
        return [(start + 10 * i, start + 10 * i + 4, i, tokens) for i in range(layers)]

    steps = [*spans(0, 200), *spans(100), *spans(140), *spans(180), *spans(220, layers=2)]
    assert [one[0][0] for one in activity.steps_in(steps)] == [100, 140, 180]
    found = activity.step_of(steps, "gpu", handoff=2e-9)
    assert found is not None and found["steps"] == 2
    assert found["seconds"] == pytest.approx(40e-9) and found["cpu_experts"] == pytest.approx(12e-9)
    assert found["handoff"] == pytest.approx(6e-9) and found["rest"] == pytest.approx(22e-9)
    assert [layer for layer, *_ in found["latest"]] == [0, 1, 2]
    # Another request, much later.
    assert activity.step_of([*spans(0), *spans(10**9)], "cpu") is None


def test_a_page_that_loads_nothing_from_elsewhere() -> None:
    files = page.files()
    assert files["/"][0].startswith(b"text/html") and len(files) > 6
    for path, (_, content) in files.items():
        text = content.decode().replace("http://www.w3.org/", "")
        assert "http://" not in text and "https://" not in text.replace("https?:", ""), path
        named = [f"/page/{name}" for name in text.split("/page/")[1:]]
        assert all(name.split('"')[0] in files for name in named), path


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_uses_and_handoff_beside_a_gpu() -> None:
    model = ktinject.load(
        trained_model("tiny-deepseek-v3"), devices="cuda:0", variables={"gpu_experts": 4}, progress=False
    )
    ids = torch.arange(40, 50, device="cuda")[None]
    write = functools.partial(model.generate, ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    wanted = chosen_by_routers(model, ids, 12)
    write()
    found = Activity(model)

    async def look() -> dict[str, Any]:
        await found.answer()
        write()
        return await found.answer()

    now = asyncio.run(look())
    found.end()
    # Steps of a graph may choose otherwise where scores are nearly equal.
    for layer, counts in wanted.items():
        assert sum(now["uses"][layer]) == sum(counts)
        different = sum(abs(a - b) for a, b in zip(now["uses"][layer], counts))
        assert different <= 0.2 * sum(counts)
    step = now["step"]
    assert step["device"] == "gpu" and 0 < step["handoff"] < 1e-3
    print("handoff", found._handoff, "step", {k: v for k, v in step.items() if k != "latest"})
