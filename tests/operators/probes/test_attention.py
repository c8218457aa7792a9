"""Layers of latent attention share one answer, unless it may depend on which layer it is."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import multimodal
from torch import Tensor, nn

from ktinject.operators.probes import attention, latent_formula
from ktinject.operators.probes.latent_formula import LatentSpec
from ktinject.support import Support

LAYERS = 6


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are run, of classes that are not remembered."""
    found: list[nn.Module] = []
    own = attention._way

    def counted(small: nn.Module) -> Any:
        found.append(small)
        return own(small)

    monkeypatch.setattr(attention, "_way", counted)
    return found


def layers(base: type | None = None) -> list[Any]:
    """The attention of a model's layers; base: a class to put before their own."""
    model: Any = models.tiny("deepseek_v3", num_hidden_layers=LAYERS)
    own = type(model.model.layers[0].self_attn)
    kind = type("Attention", (own,) if base is None else (base, own), {})
    return [kind(model.config, index) for index in range(LAYERS)]


def test_layers_that_are_alike_are_run_once(runs: list[nn.Module]) -> None:
    modules = layers()
    specs = [attention.probe(module) for module in modules]
    assert len(runs) == 1
    assert all(isinstance(spec, LatentSpec) and spec.rope == "neighbours" for spec in specs)
    assert [spec.layer_idx for spec in specs if isinstance(spec, LatentSpec)] == [*range(LAYERS)]
    assert [attention.probe(module) for module in modules] == specs and len(runs) == 1
    assert [module.layer_idx for module in modules] == [*range(LAYERS)]


class Windowed(nn.Module):
    """Every other layer is said to see a window; it computes the same."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)  # type: ignore[call-arg]
        self.sliding_window = None if layer_idx % 2 else 128


def test_kinds_of_layers_are_told_apart(runs: list[nn.Module]) -> None:
    assert all(isinstance(attention.probe(module), LatentSpec) for module in layers(Windowed))
    assert len(runs) == 2


class Scaling(nn.Module):
    """Layers from the fourth on double their output, and say so nowhere."""

    layer_idx: int

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        out, *others = super().forward(*args, **kwargs)
        return (2 * out if self.is_late() else out, *others)

    def is_late(self) -> bool:
        return self.layer_idx >= 3


class ByTable(Scaling):
    def is_late(self) -> bool:
        return (False, False, False, True, True, True)[self.layer_idx]


class ByEquality(Scaling):
    def is_late(self) -> bool:
        return self.layer_idx in (3, 4, 5)


class ByName(Scaling):
    def is_late(self) -> bool:
        return f"layer {self.layer_idx}" >= "layer 3"


@pytest.mark.parametrize("kind", [Scaling, ByTable, ByEquality, ByName])
def test_a_layer_that_computes_by_its_index_answers_for_itself(kind: type, runs: list[nn.Module]) -> None:
    found = [attention.probe(module) for module in layers(kind)]
    assert [isinstance(spec, LatentSpec) for spec in found] == [True] * 3 + [False] * 3
    assert all("something else than latent attention" in spec.reason for spec in found[3:])  # type: ignore[union-attr]
    assert len(runs) == LAYERS + 1, "once with the index hidden, then each"


def tuning(base: type | None = None, **rope: Any) -> Any:
    """Mistral 4's attention; base: a class to put before its own."""
    if "mistral3" not in multimodal.AVAILABLE:
        pytest.skip("this transformers has no mistral3")
    said = {**multimodal.TUNED_YARN, "original_max_position_embeddings": 64, **rope}
    module: Any = multimodal.tiny("mistral3", rope_parameters=said).model.language_model.layers[0].self_attn
    kind = type("Attention", (type(module),) if base is None else (base, type(module)), {})
    return kind(module.config, 0)


def test_queries_that_their_position_tunes() -> None:
    found = attention.probe(tuning(llama_4_scaling_beta=0.3))
    assert isinstance(found, LatentSpec) and found.tuned == (64.0, 0.3)
    none = attention.probe(tuning(llama_4_scaling_beta=0.0))
    assert isinstance(none, LatentSpec) and none.tuned is None
    q, positions = torch.ones(1, 2, 3, 4), torch.tensor([[63, 64, 640]])
    times = latent_formula.at_positions(found, None, q, positions)[0, 1, :, 2]
    assert torch.allclose(times, 1 + 0.3 * torch.tensor([1.0, 2.0, 11.0]).log())


class Later(nn.Module):
    """Steps of tuning come so many positions later."""

    by = 1

    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        found: Any = super().forward(*args, position_ids=position_ids - self.by, **kwargs)
        return found


class MuchLater(Later):
    by = 64


class Never(nn.Module):
    """Nothing is tuned, though the config says so."""

    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        found: Any = super().forward(*args, position_ids=0 * position_ids, **kwargs)
        return found


def test_another_law_of_tuning_is_refused() -> None:
    for kind in (Later, MuchLater):
        found = attention.probe(tuning(kind, llama_4_scaling_beta=0.3))
        assert isinstance(found, Support) and "something else than latent attention" in found.reason
    plain = attention.probe(tuning(Never, llama_4_scaling_beta=0.3))
    assert isinstance(plain, LatentSpec) and plain.tuned is None


class OtherGates(nn.Module):
    """What the gates are made of is something else."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        own: Any = self.g_proj
        self.g_proj = nn.Sequential(own, nn.Tanh())
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            self.g_proj = own


class Rescaled(nn.Module):
    """The latents are multiplied with something else than is said."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        own = self.kv_lora_scale
        self.kv_lora_scale = own * 1.5
        try:
            return super().forward(hidden_states, **kwargs)
        finally:
            self.kv_lora_scale = own


@pytest.mark.parametrize("kind", [None, OtherGates, Rescaled])
def test_gates_and_factors(kind: type | None) -> None:
    """As dots3-note has them."""
    if "dots3_note" not in multimodal.AVAILABLE:
        pytest.skip("this transformers has no dots3_note")
    for layer in multimodal.tiny("dots3_note").model.language_model.layers:
        own: Any = type(layer.self_attn)
        module = own if kind is None else type("Attention", (kind, own), {})
        found = attention.probe(module(layer.self_attn.config, layer.self_attn.layer_idx))
        if kind is None:
            assert isinstance(found, LatentSpec) and found.has_gate and found.has_key_norm
            assert found.factors == ((40 / 24) ** 0.5, (40 / 16) ** 0.5)
        else:
            assert isinstance(found, Support) and "something else than latent attention" in found.reason
