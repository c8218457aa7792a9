"""`probe` on every experts module of transformers: either described rightly or refused with the reason.

A description is shown to be right by computing: the reference, fed by it and by the views, must be the module.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
from probe_cases import PLAIN, assert_reference_is, described, refusal
from torch import nn

from ktinject.operators.probes.answer import Refusal
from ktinject.operators.probes.experts import ExpertsSpec, probe

# What differs from PLAIN, sizes aside, in the families that are not like the others.
ODD: dict[str, dict[str, Any]] = {
    "aria_text": {"is_transposed": True},
    "deepseek_v4": {"gate_max": 1.5, "up_limit": 1.5},
    "gemma4_text": {"activation": "gelu_tanh"},
    "gpt_oss": {
        "has_bias": True,
        "is_transposed": True,
        "is_concatenated": False,
        "alpha": 1.702,
        "gate_max": 1.5,
        "up_limit": 1.5,
        "up_offset": 1.0,
    },
    "hy_v4": {"gate_max": 1.5, "up_limit": 1.5},
    "minimax_m3_vl_text": {"alpha": 1.702, "gate_max": 1.5, "up_limit": 1.5, "up_offset": 1.0},
    "nemotron_h": {"has_gate": False, "activation": "relu2", "hidden_size": 20},
}


def decorated(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed")


def family_leaf(name: str, device: str = "cpu") -> nn.Module:
    if device == "cpu":
        module = models.leaf(models.tiny(name))[1]
    else:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(models.config(name))
        module = models.leaf(model)[1]
    if name == "aria_text" and not decorated(module):
        pytest.skip("this transformers routes inside AriaExperts")
    return module


# --- every family ---


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", models.AVAILABLE)
def test_family_is_described(name: str, device: str) -> None:
    spec = described(family_leaf(name, device))
    odd = dict(ODD.get(name, {}))
    if name == "gpt_oss" and "swiglu_limit" not in transformers.GptOssConfig().to_dict():
        odd |= {"gate_max": 7.0, "up_limit": 7.0}  # hard-coded there in transformers 5.17
    assert spec.intermediate_size in (24, 56)
    assert spec == replace(PLAIN, intermediate_size=spec.intermediate_size, **odd)


@pytest.mark.parametrize("name", models.AVAILABLE)
def test_family_is_the_reference(name: str) -> None:
    module = family_leaf(name)
    assert_reference_is(module, described(module))


@pytest.mark.parametrize("name", models.AVAILABLE)
def test_family_is_alive(name: str) -> None:
    """A model whose logits do not depend on its experts would prove nothing."""
    model = models.tiny(name)
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(input_ids=tokens, use_cache=False).logits
        for parameter in models.leaf(model)[1].parameters():
            parameter.zero_()
        after = model(input_ids=tokens, use_cache=False).logits
    assert before.isfinite().all() and before.std() > 0.03
    assert (after - before).norm() > 0.02 * before.norm()


@pytest.mark.parametrize("name", models.REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_family_is_refused(name: str, device: str) -> None:
    assert re.search(models.REFUSED[name][1], refusal(family_leaf(name, device)))


def test_at_least_eighteen_families() -> None:
    assert len(models.AVAILABLE) >= 18


# --- every expert class of this transformers ---


def expert_classes() -> list[tuple[str, str]]:
    """(module, class) of all decorated expert classes, found in the source."""
    found = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text()
        if "use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(
                "use_experts_implementation" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                found.append((f"transformers.models.{path.parent.name}.{path.stem}", node.name))
    return found


# Whatever name a class has for a size, it finds it here.
ANY_CONFIG = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "hidden_size": 20,
    "moe_hidden_size": 20,
    "moe_latent_size": 12,
    "intermediate_size": 28,
    "moe_intermediate_size": 28,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "swiglu_limit": 1.25,
    "swiglu_alpha": 1.5,
    "mlp_gate_softcap": 5.0,
    "mlp_up_softcap": 5.0,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}
NOT_SERVED = {
    "Inkling2Experts": "its gate is none of",  # tanh softcaps
    "MuseSparkExperts": "has_post_expert_norm",
}


@pytest.mark.parametrize("module_name,class_name", expert_classes(), ids=lambda value: value.split(".")[-1])
def test_every_expert_class(module_name: str, class_name: str) -> None:
    expert_class = getattr(importlib.import_module(module_name), class_name)
    with torch.device("meta"):
        spec = probe(expert_class(SimpleNamespace(**ANY_CONFIG)))
    if class_name in NOT_SERVED:
        assert isinstance(spec, Refusal) and NOT_SERVED[class_name] in spec.reason
        return
    assert isinstance(spec, ExpertsSpec), spec
    module = expert_class(SimpleNamespace(**ANY_CONFIG))
    assert described(module) == spec
    assert_reference_is(module, spec)


def test_the_decorator_serves_more_than_fifty_classes() -> None:
    assert len(expert_classes()) >= 50


@pytest.mark.parametrize("limit", [None, 1.5])
def test_step3p7_clamps_after_the_activation(limit: float | None) -> None:
    """Not decorated, but standard: min(silu(gate), limit) is silu(min(gate, another limit))."""
    step3p7 = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    module = step3p7.Step3p7Experts(SimpleNamespace(**ANY_CONFIG), swiglu_limit=limit)
    spec = described(module)
    assert spec.up_limit == (inf if limit is None else limit)
    if limit is not None:
        assert torch.nn.functional.silu(torch.tensor(spec.gate_max)).item() == pytest.approx(limit)
    assert_reference_is(module, spec)
