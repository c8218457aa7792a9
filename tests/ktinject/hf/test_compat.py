"""Private names of transformers and torch: all are listed, this version has them, and what happens if it has not."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import transformers
from double import EXPERTS, on_meta, saved
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.integrations import PeftAdapterMixin

import ktinject
from ktinject.errors import CheckpointError, PlanError
from ktinject.hf import compat
from ktinject.hf import private as private_names
from ktinject.hf.compat import PRIVATE, SET, THERE, Private
from ktinject.hf.kimi_k2 import KimiK2Config, _model_class
from ktinject.serving import stock

torch.set_num_threads(1)
ROOT = Path(__file__).parents[3]
FILES = [
    file
    for folder in ("ktinject", "operators")
    for file in (ROOT / folder).rglob("*.py")
    # What it takes of SGLang is looked up by version, see ktinject/sglang/plugin.py.
    if file.name != "compat.py" and file.parent.name != "sglang"
]
# Modules of transformers whose documentation names what is taken from them.
PUBLIC = (
    "transformers",
    "transformers.modeling_outputs",
    "transformers.utils",
    "transformers.generation.streamers",
    "transformers.image_utils",
    "transformers.quantizers",
    "transformers.utils.quantization_config",
)
IDS = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def looked_at_anew() -> Iterator[None]:
    """What a test changes is seen, and forgotten afterwards."""
    compat.support.cache_clear()
    yield
    compat.support.cache_clear()


# The list


@pytest.mark.parametrize("owner", ["torch._C", "transformers.modeling_utils"])
@pytest.mark.parametrize("is_tested", [True, False])
@pytest.mark.parametrize("is_imported", [True, False])
def test_what_is_expected_of_a_version(
    owner: str, is_tested: bool, is_imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is gone is missed only in a tested version that is not imported yet."""
    monkeypatch.setitem(PRIVATE, "probes", (Private(owner, "_never_there", THERE, "nothing"),))
    monkeypatch.setattr(compat, "TESTED", (transformers.__version__,) if is_tested else ("5.0.0",))
    if not is_imported:
        monkeypatch.setattr(compat, "sys", SimpleNamespace(modules={}))
    is_missed = owner.startswith("transformers") and is_tested and not is_imported
    assert compat.expected_support("probes").ok == is_missed


def test_doctor_imports_no_models_of_a_tested_version() -> None:
    if transformers.__version__ not in compat.TESTED:
        pytest.skip("this version is not a tested one, so all of it is looked at")
    code = "import sys, ktinject; ktinject.doctor(); sys.exit('transformers.modeling_utils' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


NEEDS_PACKAGES = {"serving": stock.PACKAGES}  # that are an extra


def needed(feature: str) -> bool:
    return all(map(importlib.util.find_spec, NEEDS_PACKAGES.get(feature, ())))


@pytest.mark.parametrize("feature", [feature for feature in PRIVATE if needed(feature)])
def test_this_version_has_all_of_a_feature(feature: str) -> None:
    assert [fault for private in PRIVATE[feature] if (fault := private.fault())] == []
    assert compat.support(feature)


def test_supported_versions_are_those_that_pip_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert compat.VERSIONS in project["dependencies"]
    oldest = compat.VERSIONS.partition(">=")[2].partition(",")[0]
    assert compat.TESTED[0].startswith(f"{oldest}.")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and len(name) > 1


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to things of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def used(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that a file asks something for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] != "ktinject":
            yield from (alias.name for alias in node.names if is_private(alias.name))


def test_each_private_name_in_use_is_in_the_list() -> None:
    trees = {file: ast.parse(file.read_text()) for file in FILES}
    ours = {name for tree in trees.values() for name in defined(tree)}
    # Python's own, endings of names in checkpoints and configs, and our own package.
    ours |= {"_replace", "_asdict", "_current_frames", "_exit", "_abc", "_native", "_C"}
    ours |= {"_token_id", "_proj", "_scale_inv", "_scales", "_blocks", "_bias", "_shexp", "_token"}
    ours |= {"_packed", "_scale", "_scale_2", "_global_scale", "_weight_scale", "_weight_scale_2"}
    known = {private.name for rows in PRIVATE.values() for private in rows}
    unknown = {
        f"{file.relative_to(ROOT)}: {name}"
        for file, tree in trees.items()
        for name in {*used(tree)} - ours - known
    }
    assert len(FILES) > 80 and not unknown


def test_each_import_from_the_inside_of_transformers_is_in_the_list() -> None:
    inside = {
        f"{file.relative_to(ROOT)}: {node.module}.{alias.name}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transformers"
        for alias in node.names
        if node.module not in PUBLIC
        or (node.module == "transformers" and not hasattr(transformers, alias.name))
    }
    assert not inside


def test_each_name_in_the_list_is_in_use() -> None:
    text = "\n".join(file.read_text() for file in FILES)
    names = {private.name for rows in PRIVATE.values() for private in rows}
    base = {"WeightTransform", "install_output_capuring_hook"}  # of a class in use; known by their module
    assert {name for name in names - base if name.lstrip("_") not in text} == set()


# What fits


def takes(ids: Any, mask: Any = None, *rest: Any, cache: Any = True, **others: Any) -> None:
    rest.index(others)


class Owner:
    there = 1

    def __init__(self, value: int) -> None:
        self.kept = value


@pytest.mark.parametrize(
    "signature, fits",
    [
        ("(ids)", True),
        ("(ids, mask=None)", True),
        ("(ids, *, cache)", True),
        ("(ids, mask, *, cache=True, **model_kwargs)", True),
        ("(ids, *, mask)", True),
        ("(ids, mask=1)", False),  # another default
        ("(mask, ids)", False),
        ("(ids, cache)", False),  # by keyword only
        ("(tokens)", False),
        ("()", False),  # ids has no default
    ],
)
def test_a_signature_fits_if_it_allows_all_calls_of_another(signature: str, fits: bool) -> None:
    fault = Private(__name__, "takes", signature, "tests").fault()
    taken = f"{__name__}.takes takes (ids, mask=None, *rest, cache=True, **others), not {signature}"
    assert fault == ("" if fits else taken)


@pytest.mark.parametrize(
    "owner, name, kind, fault",
    [
        (":Owner", "there", THERE, ""),
        (":Owner", "away", THERE, "Owner.away is gone"),
        (":Owner.__init__", "kept", SET, ""),
        (":Owner.__init__", "away", SET, "Owner.__init__.away is gone"),
        (":Nobody", "there", THERE, "Nobody.there is gone"),
        ("_nowhere", "there", THERE, "_nowhere.there is gone"),
    ],
)
def test_what_is_gone_is_named(owner: str, name: str, kind: str, fault: str) -> None:
    assert Private(f"{__name__}{owner}", name, kind, "tests").fault() == fault.replace(
        "_now", f"{__name__}_now"
    )


# What is lacking


def as_ever(self: Any, result: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
    """The first parameter by another name, which transformers' own calls do not use."""
    return UPDATE(self, result, model_kwargs, *args, **kwargs)


UPDATE = GenerationMixin._update_model_kwargs_for_generation


def swapped(name: str) -> PreTrainedModel:
    return ktinject.optimize(copy.deepcopy(models.tiny(name)), [EXPERTS], devices="cpu", progress=False)


def test_generate_is_transformers_own_where_its_inside_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    stock = models.tiny("qwen3_moe").generate(IDS, **request)
    own = swapped("qwen3_moe")
    assert torch.equal(own.generate(IDS, **request), stock)
    assert "stock" not in own.ktinject_decoding.last and not own.ktinject.notes

    monkeypatch.setattr(GenerationMixin, "_update_model_kwargs_for_generation", as_ever)
    compat.support.cache_clear()
    why = (
        f"in transformers {transformers.__version__} and torch {torch.__version__}, "
        "GenerationMixin._update_model_kwargs_for_generation takes "
        "(self, result, model_kwargs, *args, **kwargs), "
        "not (self, outputs, model_kwargs, is_encoder_decoder=False, num_new_tokens=1)"
    )
    model = swapped("qwen3_moe")
    assert model.ktinject_decoding.reason == why
    assert f"generate runs transformers' own loop: {why}" in model.ktinject.notes
    finding = next(found for found in ktinject.doctor().findings if found.subject == "transformers")
    assert finding.reason == f"generation: {why}" and "generation" not in finding.uses
    for changes in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        arguments = {**request, **changes}
        assert torch.equal(
            model.generate(IDS, **arguments), models.tiny("qwen3_moe").generate(IDS, **arguments)
        )
        assert model.ktinject_decoding.last == "stock loop" and model.ktinject_decoding.reason == why
    assert model.ktinject_decoding.requests["stock loop"] == 3
    assert caplog.text.count("runs without") == 1

    # Loading is another matter.
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    loaded = ktinject.load(folder, [EXPERTS], devices="cpu", progress=False)
    assert torch.equal(loaded.generate(IDS, **request), stock)


def test_generate_is_transformers_own_where_a_name_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._cuda_endAllocateToPool")
    plain, model = models.tiny("deepseek_v3"), swapped("deepseek_v3")
    assert model.ktinject_decoding.reason.endswith("torch._C._cuda_endAllocateToPool is gone")
    request: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "eos_token_id": None}
    torch.manual_seed(3)
    ours = model.generate(IDS, **request)
    torch.manual_seed(3)
    assert torch.equal(ours, plain.generate(IDS, **request))


@pytest.mark.parametrize(
    "target, fault",
    [
        (
            "transformers.modeling_utils.PreTrainedModel._load_pretrained_model",
            r"PreTrainedModel\._load_pretrained_model takes \(files\), not \(model, state_dict, .*\)",
        ),
        (
            "transformers.core_model_loading.rename_source_key",
            r"transformers\.core_model_loading\.rename_source_key takes \(files\), not \(source_key, .*\)",
        ),
    ],
)
def test_loading_is_refused_by_name(
    target: str, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    meta = on_meta(models.tiny("qwen3_moe"))
    monkeypatch.setattr(
        target, staticmethod(lambda files: None) if "Model." in target else lambda files: None
    )
    message = (
        rf"^loading: in transformers [\d.]+ and torch \S+, {fault}\. Supported is {re.escape(compat.VERSIONS)}, tested "
        r"with 5\.17\.0 and .*\. Install one of those: pip install 'transformers==.*'\.$"
    )
    for call in (
        lambda: ktinject.load(folder, [EXPERTS], devices="cpu", progress=False),
        lambda: ktinject.plan(meta, [EXPERTS], checkpoint=folder, devices="cpu"),
        lambda: ktinject.optimize(meta, [EXPERTS], checkpoint=folder, devices="cpu", progress=False),
    ):
        with pytest.raises(PlanError, match=message):
            call()
    assert type(meta.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
    # A model that has its weights needs no loader.
    swapped("qwen3_moe")


def test_swapping_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PeftAdapterMixin, "_hf_peft_config_loaded")
    with pytest.raises(
        PlanError, match=r"^swapping: .*PreTrainedModel\._hf_peft_config_loaded is gone\. Supp"
    ):
        swapped("qwen3_moe")


def test_kimi_k2_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = saved(models.tiny("kimi_k2"), tmp_path)
    names = importlib.import_module("transformers.conversion_mapping")
    monkeypatch.delattr(names, "get_checkpoint_conversion_mapping")
    compat.support.cache_clear()
    _model_class.cache_clear()
    with pytest.raises(PlanError, match=r"^kimi k2: .*get_checkpoint_conversion_mapping is gone"):
        KimiK2Config()
    with pytest.raises(CheckpointError, match=r"kimi k2: .*get_checkpoint_conversion_mapping is gone"):
        ktinject.load(folder, [EXPERTS], devices="cpu", progress=False)


def test_a_name_is_looked_up_without_its_underscore() -> None:
    assert compat.get_current_dispatch_mode is torch.utils._python_dispatch._get_current_dispatch_mode
    assert nn.modules.module.register_module_module_registration_hook is (
        compat.register_module_module_registration_hook
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        compat.nothing  # noqa: B018


def test_a_function_that_another_library_has_put_in_place_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = torch.nn.Module.__init__
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    assert not [private.fault() for private in compat.PRIVATE["swapping"] if private.fault()]


def test_every_function_whose_code_is_read_is_in_the_file_that_is_named() -> None:
    groups = (PRIVATE[feature] for feature in filter(needed, PRIVATE))
    for private in (private for group in groups for private in group if private.signature == SET):
        module = private.owner.partition(":")[0]
        code = inspect.unwrap(private_names.resolve(private.owner)).__code__
        if "_dynamo" in code.co_filename:
            continue  # another test of this process has compiled something
        assert code.co_filename in (importlib.import_module(module).__file__, "<string>"), private
