"""All or nothing: whatever fails wherever, the model is as it was, the memory is back and the next call works."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import EXPERTS, HeldExperts, machine, on_meta, saved
from test_plan import BLOCK, LINEAR  # registers held_block and held_linear
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError, OperatorError, PlanError
from ktinject.hf import compat
from ktinject.hf import models as hf
from ktinject.loading.inject import Transaction
from ktinject.model_class import stored_state

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = models.tiny("deepseek_v3", tie_word_embeddings=True)
    return saved(model, tmp_path_factory.mktemp("inject") / "model", max_shard_size="60KB")


@pytest.fixture(scope="module", autouse=True)
def asked(folder: Path) -> None:
    """What is asked once in a process: not while one of its functions fails, or that question would be refused."""
    for feature in compat.PRIVATE:
        compat.support(feature)
    ktinject.plan(on_meta(folder), [EXPERTS])


@pytest.fixture(scope="module")
def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def snapshot(model: PreTrainedModel) -> Any:
    """Everything that may not change: by identity where identity counts, by content where it is a container."""

    def look(value: object, depth: int = 0) -> Any:
        if isinstance(value, dict) and depth < 3:
            return id(value), [(key, look(item, depth + 1)) for key, item in value.items()]
        if isinstance(value, set | list | tuple) and depth < 3:
            return id(value), [look(item, depth + 1) for item in value]
        if isinstance(value, torch.Tensor):
            return id(value), value.device, value.dtype, look(vars(value), depth + 1)
        return id(value)

    configs = [model.config, type(model), *(type(module) for module in model.modules())]
    return [look(vars(module)) for module in model.modules()] + [look({**vars(c)}, 1)[1] for c in configs]


class Injected(Exception):
    """Not one of ours: anything may go wrong."""


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: BaseException) -> None:
    """Let the given call of a function fail; later calls work again."""
    original = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


ERRORS = [Injected, OperatorError, MemoryError]
STEPS = [
    ("ktinject.optimize.make", 1),
    ("ktinject.loading.inject.build", 1),
    ("ktinject.loading.inject.apply", 1),
    ("ktinject.hf.models.untie", 1),
    ("ktinject.hf.models.load_rest", 1),
    ("ktinject.hf.models.drop_quantization", 1),
    ("ktinject.hf.models.generation_config", 1),
    ("ktinject.checkpoints.reader.Reader.read", 1),
    ("ktinject.checkpoints.reader.Reader.read", 7),
    ("ktinject.checkpoints.reader.Reader.read", 19),
    ("ktinject.checkpoints.reader.Reader.read", 30),
    ("double.HeldExperts.build", 1),
    ("double.HeldExperts.build", 2),
    ("double.HeldExperts.allocate", 1),
    ("double.HeldExperts.load", 1),
    ("double.HeldExperts.load", 13),
    ("double.HeldExperts.finish", 1),
    ("torch.nn.Module.set_submodule", 1),
    ("transformers.PreTrainedModel._load_pretrained_model", 1),
    ("transformers.PreTrainedModel._finalize_model_loading", 1),
    ("transformers.PreTrainedModel.tie_weights", 1),
    ("transformers.PreTrainedModel._init_weights", 5),
    ("transformers.PreTrainedModel.eval", 1),
]


# A Ctrl-C at every step, and the other errors in turn: at every fourth step, at the others in a nightly run.
CASES = [
    *((*step, KeyboardInterrupt) for step in STEPS),
    *(
        pytest.param(*step, ERRORS[i % len(ERRORS)], marks=[] if i % 4 == 0 else pytest.mark.nightly)
        for i, step in enumerate(STEPS)
    ),
]


@pytest.mark.parametrize("step, call, kind", CASES)
def test_a_failure_anywhere_leaves_the_model_as_it_was(
    step: str,
    call: int,
    kind: type[BaseException],
    folder: Path,
    logits: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = on_meta(folder)
    model.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    held = track(monkeypatch)
    with monkeypatch.context() as patched:
        owner, _, name = step.rpartition(".")
        fail(patched, resolve(owner), name, call, kind("injected"))
        # What goes wrong in an operator is said with its place.
        said = OperatorError if kind is Injected and owner == "double.HeldExperts" else kind
        with pytest.raises(said, match="injected") as caught:
            ktinject.optimize(model, [EXPERTS], progress=False)
        assert snapshot(model) == before
        assert not hasattr(model, "ktinject")
        # The exception is still alive here, as it is in an interactive session; the memory must not be.
        gc.collect()
        assert not [operator for operator in held if operator() is not None and operator().held]
    del caught
    ktinject.optimize(model, [EXPERTS], progress=False)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)


def resolve(path: str) -> Any:
    """A module or class by its dotted path; not by attributes, since `ktinject.optimize` is a function, too."""
    try:
        importlib.import_module(path)
        return sys.modules[path]
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(importlib.import_module(owner), name)


def track(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HeldExperts]]:
    """Weak references to all operators that are made from now on."""
    made: list[weakref.ref[HeldExperts]] = []
    original = HeldExperts.__init__

    def init(self: HeldExperts, *args: Any) -> None:
        original(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(HeldExperts, "__init__", init)
    return made


def test_a_failure_of_a_model_with_weights_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.tiny("qwen3_moe")
    before, want = snapshot(model), model(IDS).logits
    for step, call in (("apply", 1), ("build", 1)):
        with monkeypatch.context() as patched:
            fail(patched, resolve("ktinject.loading.inject"), step, call, Injected("injected"))
            with pytest.raises(Injected):
                ktinject.optimize(model, [EXPERTS], progress=False)
        assert snapshot(model) == before
        assert torch.equal(model(IDS).logits, want)


@pytest.mark.parametrize("method", ["allocate", "load", "finish", "connect"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_an_operator_that_fails_while_it_is_filled_is_named(
    method: str, has_weights: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise IndexError("beyond the tiles")

    model = AutoModelForCausalLM.from_pretrained(folder) if has_weights else on_meta(folder)
    monkeypatch.setattr(HeldExperts, method, failing)
    with pytest.raises(OperatorError) as caught:
        ktinject.optimize(model, [EXPERTS], progress=False, checkpoint=None if has_weights else folder)
    assert str(caught.value) == (
        "<python>:rules[0]: rule 'experts': model.layers.1.mlp.experts: held_experts: IndexError: beyond the tiles"
    )


def test_refusals_leave_the_model_as_it_was(folder: Path) -> None:
    model = on_meta(folder)
    before = snapshot(model)
    for arguments, kind in (
        ({"rules": [EXPERTS], "budget": {"cpu": "1KiB"}}, PlanError),
        ({"rules": [EXPERTS], "devices": "cuda:9"}, PlanError),
        ({"rules": "no-such-rules"}, ktinject.RuleError),
        ({"rules": [EXPERTS], "checkpoint": folder / "nothing"}, CheckpointError),
        ({"rules": [EXPERTS | {"replace": {"operator": "held_experts", "refuse": "no"}}]}, PlanError),
    ):
        with pytest.raises(kind):
            ktinject.optimize(model, **arguments, progress=False)  # type: ignore[arg-type]
        assert snapshot(model) == before


def test_a_transaction_changes_nothing_back_until_it_is_told_to() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model.config = models.config("qwen3_moe")
    transaction = Transaction(model)  # type: ignore[arg-type]
    model.append(nn.Linear(1, 1))
    assert len(model) == 2
    transaction.restore()
    assert len(model) == 1


# What a swapped model is


@pytest.fixture()
def swapped(folder: Path) -> PreTrainedModel:
    return ktinject.optimize(on_meta(folder), [EXPERTS], progress=False)


def test_a_swapped_model_cannot_be_swapped_again(swapped: PreTrainedModel) -> None:
    with pytest.raises(PlanError, match="is swapped already"):
        ktinject.optimize(swapped, [EXPERTS], progress=False)


def test_the_plan_is_on_the_model(swapped: PreTrainedModel) -> None:
    assert [replacement.path for replacement in swapped.ktinject.replacements] == [
        "model.layers.1.mlp.experts"
    ]
    assert isinstance(swapped.model.layers[1].mlp.experts, HeldExperts)
    assert not any(".experts." in name for name in stored_state(swapped))


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_copying_operators_is_refused(copying: Any, swapped: PreTrainedModel) -> None:
    with pytest.raises(
        OperatorError, match=r"a swapped (model|module) cannot be (copied|pickled), its weights"
    ):
        copying(swapped)
    if copying is pickle.dumps:
        with pytest.raises(OperatorError, match="held_experts: a swapped module cannot be pickled"):
            copying(swapped.model.layers[1].mlp.experts)


def test_a_lossless_model_saves_the_checkpoint_it_came_from(
    swapped: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    saved(swapped, tmp_path, max_shard_size="100KB")
    with Checkpoint.open(tmp_path) as ours, Checkpoint.open(folder) as theirs:
        assert ours.names == theirs.names
        for name in ours.names:
            assert torch.equal(ours.read(name), theirs.read(name)), name
    assert hf.read_config(tmp_path).architectures == ["DeepseekV3ForCausalLM"]


def test_a_model_with_rounded_weights_is_not_saved(
    swapped: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldExperts, "is_lossless", lambda self: False)
    with pytest.raises(
        OperatorError, match=r"cannot be saved: held_experts \(fp32\) holds rounded weights"
    ) as caught:
        swapped.save_pretrained(tmp_path)
    assert f"Copy the original checkpoint folder ({folder})" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_operator_that_does_not_describe_its_weights_is_saved_or_named(
    swapped: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldExperts, "describe", lambda self: {"kernel": "torch"})
    saved(swapped, tmp_path / "lossless")
    monkeypatch.setattr(HeldExperts, "is_lossless", lambda self: False)
    with pytest.raises(OperatorError, match=r"cannot be saved: held_experts holds rounded weights"):
        swapped.save_pretrained(tmp_path / "lossy")


def test_weights_that_do_not_fit_the_models_dtype_are_not_saved(folder: Path, tmp_path: Path) -> None:
    model = hf.meta_model(hf.read_config(folder), torch.bfloat16)
    ktinject.optimize(model, [EXPERTS], progress=False, checkpoint=folder)
    with pytest.raises(OperatorError, match=r"gate_up_proj does not fit torch\.bfloat16"):
        model.save_pretrained(tmp_path)


def test_saving_without_the_memory_for_it_is_refused(
    swapped: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = machine(memory=1000)
    monkeypatch.setattr("ktinject.machine.detect", lambda **how: small)
    with pytest.raises(
        OperatorError, match=r"saving needs 67.5 KiB for unpacked weights, and 1000 B are free"
    ):
        swapped.save_pretrained(tmp_path)


def test_a_given_state_dict_is_saved_as_it_is(swapped: PreTrainedModel, tmp_path: Path) -> None:
    swapped.save_pretrained(tmp_path, state_dict={"lm_head.weight": torch.zeros(2)})
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.names) == ["lm_head.weight"]


def test_a_swapped_model_is_freed_when_it_is_dropped(folder: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = ktinject.load(folder, [EXPERTS], progress=False)
        operator = weakref.ref(model.model.layers[1].mlp.experts)
        del model
        assert operator() is None, "no cycle keeps it until Python looks for cycles"
    finally:
        gc.enable()


# Operators that take less or more than a leaf


def test_a_tied_head_can_be_replaced(folder: Path, logits: torch.Tensor) -> None:
    model = ktinject.optimize(on_meta(folder), [LINEAR], progress=False)
    assert type(model.lm_head).__name__ == "HeldLinear"
    model.tie_weights()
    assert "weight" not in dict(model.lm_head.named_parameters()), (
        "tying would put a parameter on the operator"
    )
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    assert type(model)._tied_weights_keys, "the class is not changed"


def test_a_block_operator_keeps_its_router_and_its_experts_may_be_replaced(tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe", output_router_logits=True)
    folder = saved(original, tmp_path)
    for rules in ([BLOCK], [BLOCK, EXPERTS]):
        model = ktinject.optimize(on_meta(folder), rules, progress=False)
        block = model.model.layers[0].mlp
        assert type(block).__name__ == "HeldBlock" and type(block.gate).__name__ == "Qwen3MoeTopKRouter"
        assert isinstance(block.experts, HeldExperts) == (EXPERTS in rules)
        with torch.no_grad():
            ours, theirs = model(IDS), original(IDS)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-6)
        assert torch.equal(ours.router_logits[1], theirs.router_logits[1]), "the router's hook still runs"
