"""Models that several threads build at once: each has the dtype that it was asked for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models
import prepared
import pytest
import torch
from double import EXPERTS, on_meta
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoModelForCausalLM, modeling_utils

import ktinject
from ktinject.errors import PlanError
from ktinject.hf import building, compat, dtypes
from ktinject.hf import models as hf


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def in_transformers(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_config(models.config("qwen3_moe"), dtype=dtype)


def in_ktinject(dtype: torch.dtype) -> Any:
    return hf.meta_model(models.config("qwen3_moe"), dtype)


@pytest.mark.parametrize("build", [in_transformers, in_ktinject])
def test_threads_build_one_after_the_other(build: Any) -> None:
    """The first thread waits, at its first module, for another one to come as far; which it must not."""
    first, came = threading.get_ident(), threading.Event()

    def waits(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() != first:
            came.set()
        elif not pending:
            pending.append(pool.submit(build, torch.bfloat16))
            assert not came.wait(0.3)

    pending: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        hook = register_module_module_registration_hook(waits)
        try:
            mine = build(torch.float32)
            other = pending[0].result()
        finally:
            hook.remove()
    assert came.is_set()
    assert (dtypes_of(mine), dtypes_of(other)) == ({torch.float32}, {torch.bfloat16})
    assert torch.get_default_dtype() == torch.float32


def test_requests_are_right_while_another_thread_builds() -> None:
    """Its default dtype is that of the process for so long."""
    model: Any = ktinject.optimize(models.tiny("qwen3_next"), "auto", devices=["cpu"], progress=False)
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(0))

    def written() -> list[int]:
        asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        found: list[int] = model.generate(ids, **asked)[0].tolist()
        return found

    want, begun, end = written(), threading.Event(), threading.Event()

    def waits(module: nn.Module, name: str, child: nn.Module | None) -> None:
        begun.set()
        end.wait(60)

    with ThreadPoolExecutor(1) as pool:
        hook = register_module_module_registration_hook(waits)
        try:
            other = pool.submit(in_transformers, torch.bfloat16)
            begun.wait(60)
            hook.remove()
            assert torch.get_default_dtype() == torch.bfloat16
            assert written() == want
        finally:
            end.set()
        assert dtypes_of(other.result()) == {torch.bfloat16}


def test_a_build_that_fails_leaves_the_default_dtype_and_lets_others_build() -> None:
    with pytest.raises(PlanError, match="makes no model"):
        hf.build_on_meta(lambda *_, **__: 1 / 0, models.config("qwen3_moe"), torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        assert dtypes_of(pool.submit(in_ktinject, torch.float16).result(60)) == {torch.float16}
    assert torch.get_default_dtype() == torch.float32


def test_transformers_is_changed_once() -> None:
    made = modeling_utils.local_torch_dtype
    building.install()
    assert modeling_utils.local_torch_dtype is made is not compat.local_torch_dtype


FORKED = """
import os, sys, threading, time, torch
from ktinject.hf import building
begun, end = threading.Event(), threading.Event()
def build():
    with building.alone():
        torch.set_default_dtype(torch.bfloat16)
        begun.set()
        end.wait(0.5)
thread = threading.Thread(target=build)
thread.start()
begun.wait()
child = os.fork()
if not child:
    with building.alone():
        os._exit(0 if torch.get_default_dtype() == torch.float32 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""


def test_a_child_has_neither_the_lock_nor_the_dtype_of_a_thread_that_builds() -> None:
    assert prepared.run(FORKED, check=True).stdout == "0\n"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_config_asks_for_is_no_fault(family: str, dtype: torch.dtype) -> None:
    """Some parameters are made in fp32, whatever is asked for."""
    model = hf.meta_model(models.config(family), dtype)
    assert dtypes.fault(model) == ""
    assert dtypes.fault(model.to(torch.float16)) == ""


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoehybrid"])
def test_parameters_of_another_dtype_are_refused_by_name(family: str) -> None:
    more: dict[str, Any] = {"layer_types": ["mamba", "attention"]} if family == "granitemoehybrid" else {}
    model = on_meta(models.tiny(family, **more))
    name = "model.layers.1.self_attn.k_proj.weight" if not more else "model.layers.0.mamba.A_log"
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    setattr(module, last, nn.Parameter(getattr(module, last).bfloat16()))
    with pytest.raises(PlanError, match=rf"{name} is bfloat16, not float32.*Build it once more"):
        ktinject.plan(model, [EXPERTS])
    assert not hasattr(model, "ktinject")
