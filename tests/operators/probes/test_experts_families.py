"""`probe` on every experts module of transformers: either described rightly or refused with the reason.

A description is shown to be right by computing: the reference, fed by it and by the views, must be the module.
"""

from __future__ import annotations

import ast
import importlib
import re
from math import inf
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import torch
import transformers
from probe_cases import KINDS, assert_reference_is, described, experts_module, refusal, spec_of

from ktinject.operators.probes.experts import ExpertsSpec, probe
from ktinject.support import Support

# --- every family ---


@pytest.mark.parametrize("name", models.AVAILABLE)
def test_family_is_described_and_is_the_reference(name: str) -> None:
    module = experts_module(name)
    spec = described(module)
    assert spec == spec_of(name)
    assert_reference_is(module, spec)


@pytest.mark.parametrize("name", KINDS)
def test_family_is_described_on_meta(name: str) -> None:
    assert described(experts_module(name, "meta")) == spec_of(name)


def test_every_spec_has_one_family_that_kernels_are_tested_with() -> None:
    specs = [spec_of(name) for name in KINDS]
    assert len(set(specs)) == len(specs) and {spec_of(name) for name in models.AVAILABLE} == set(specs)


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
    assert re.search(models.REFUSED[name][1], refusal(experts_module(name, device)))


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
    "Inkling2LoopExperts": "its gate is none of",  # the same
    "MuseSparkExperts": "has_post_expert_norm",
}


@pytest.mark.parametrize("module_name,class_name", expert_classes(), ids=lambda value: value.split(".")[-1])
def test_every_expert_class(module_name: str, class_name: str) -> None:
    expert_class = getattr(importlib.import_module(module_name), class_name)
    with torch.device("meta"):
        spec = probe(expert_class(SimpleNamespace(**ANY_CONFIG)))
    if class_name in NOT_SERVED:
        assert isinstance(spec, Support) and NOT_SERVED[class_name] in spec.reason
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
