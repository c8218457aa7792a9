"""From a config to a model on meta, and what is not swapped through transformers' own loader.

    config.json ──► `meta_model` ──► (swap) ──► `load_rest`: transformers' own loader for all that is not swapped

What of transformers' inside this takes is in compat.py.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ktinject.checkpoints import beside
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError, PlanError, listed
from ktinject.hf import building, compat, config_values, plugin
from ktinject.hf.auto_classes import auto_class, writing_part
from ktinject.hf.key_map import KeyMap, matches
from ktinject.hf.plugin import KTInjectConfig
from ktinject.machine import device_of

MAX_MODULES = 50_000  # DeepSeek-V3 has some 2,000


class _Lazy:
    """Stands for a tensor in the state dict that transformers' loader gets: read when it is indexed."""

    def __init__(self, read: Callable[[str], Tensor], key: str) -> None:
        self._read, self._key = read, key

    def __getitem__(self, _: object) -> Tensor:
        return self._read(self._key)


def load_rest(
    model: PreTrainedModel,
    mapping: KeyMap,
    read: Callable[[str], Tensor],
    device_map: Mapping[str, str],
    where: str,
) -> None:
    """Let transformers load everything the swapped model still has, and put it into evaluation mode.

    model       swapped; what is left of it may be on meta
    mapping     of the model as it was before the swap
    read        key → the tensor as floats, on the CPU; called from several threads
    device_map  module path or "" → device
    where       the checkpoint's name, for refusals
    Raises      CheckpointError for every parameter that was not filled, with all in one report
    """
    names = model.state_dict().keys()
    state: dict[str, _Lazy] = {}
    for name in names:
        # Tied to a parameter that an operator took, and stored under that one's name only: transformers would not find
        # it under a name that the model no longer has.
        alone = name in mapping.shared and mapping.shared[name] not in names
        state |= {name if alone else key: _Lazy(read, key) for key in mapping.keys(name)}
    # As in `from_pretrained`, no module counts as initialised: buffers that no checkpoint has are computed.
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    config = compat.LoadStateDictConfig(
        pretrained_model_name_or_path=where,
        device_map=dict(device_map),
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=mapping.transforms,
    )
    with _quiet():
        try:
            info, _ = type(model)._load_pretrained_model(model, state, None, config)
        except RuntimeError as error:
            if "can't start new thread" not in str(error):
                raise
            raise CheckpointError(
                f"{where}: there is no room for the threads that read it. Free memory, or raise the limits of memory "
                "(ulimit -v) and of threads (ulimit -u)."
            ) from error
        # Of two tied parameters one is enough, whichever it is.
        tied = [{*pair} for pair in model.all_tied_weights_keys.items()]
        filled = {name for pair in tied if pair - info.missing_keys for name in pair}
        optional = set(model._keys_to_ignore_on_load_missing or ())
        missing = [name for name in info.missing_keys - filled if not matches(optional, name)]
        faults = [f"{name}: not filled" for name in missing]
        faults += [f"{key}: belongs nowhere" for key in info.unexpected_keys]
        faults += [f"{name}: found {list(a)}, expected {list(b)}" for name, a, b in info.mismatched_keys]
        faults += [f"{name}: {text.splitlines()[-1]}" for name, text in info.conversion_errors.items()]
        if faults:
            raise CheckpointError(f"{where}: transformers could not load it:{listed(sorted(faults))}")
        with _stand_ins(model):
            type(model)._finalize_model_loading(model, config, info)
    model.eval()
    # Only what this checkpoint used is undone by `save_pretrained`; the keys of swapped modules count, too.
    model._weight_conversions = [entry for entry in mapping.transforms if entry.was_used()]


def random_rest(model: PreTrainedModel, device_map: Mapping[str, str]) -> None:
    """Random values for everything that is on meta, on its device: matrices small, vectors one, buffers as computed.

    device_map  module path or "" → device
    """
    dtype_of = final_dtype(model)
    for path, module in model.named_modules():
        device = device_of(device_map, path)
        for name, value in module._parameters.items():
            if value is None or not value.is_meta:
                continue
            full = f"{path}.{name}"
            found = torch.empty(value.shape, dtype=dtype_of(full, value), device=device)
            # Large embeddings: the token decides on the experts, not the context, so few are used twice in a row.
            std = 1.0 if isinstance(module, nn.Embedding) else 0.02
            found = found.normal_(std=std) if value.dim() > 1 else found.fill_(0.0 if name == "bias" else 1.0)
            module._parameters[name] = nn.Parameter(found, requires_grad=False)
        absent = [name for name, value in module._buffers.items() if value is not None and value.is_meta]
        for name in absent:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device=device)
        # An operator says that it is none of transformers' business; a router's bias may be zero.
        if absent and not getattr(module, "_is_hf_initialized", False):
            parts = path.split(".")
            owners = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts), -1, -1)]
            module._is_hf_initialized = False
            with _stand_ins(model):
                next(owner for owner in owners if isinstance(owner, PreTrainedModel))._init_weights(module)
    model.tie_weights()


@contextmanager
def _stand_ins(model: PreTrainedModel) -> Iterator[None]:
    """Let `_init_weights` of a parent module reach for parameters that operators have taken.

    What it finds is on meta and marked as initialised, so nothing is computed.
    """
    plan = getattr(model, "ktinject", None)
    added: list[tuple[Any, str]] = []

    def add(owner: Any, name: str, value: Any) -> None:
        # Past properties, which unpack weights, and past nn.Module, which would look at what it is given.
        if name not in vars(owner) and not hasattr(type(owner), name):
            vars(owner)[name] = value
            added.append((owner, name))

    try:
        for replacement in plan.replacements if plan else ():
            for name, shape in replacement.parameter_shapes.items():
                owner: Any = model.get_submodule(replacement.path)
                *parents, last = name.split(".")
                for parent in parents:
                    if not hasattr(owner, parent):
                        add(owner, parent, SimpleNamespace())
                    owner = getattr(owner, parent)
                tensor: Any = torch.empty(shape, device="meta", dtype=torch.float32)
                tensor._is_hf_initialized = True
                add(owner, last, tensor)
        yield
    finally:
        for owner, name in added:
            del vars(owner)[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars away: a library that was not asked to does not print."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def untie(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Forget that swapped parameters are tied; `tie_weights` would put a Parameter on the operator."""
    for name in set(names) & model.all_tied_weights_keys.keys():
        del model.all_tied_weights_keys[name]
        model._tied_weights_keys = {k: v for k, v in (model._tied_weights_keys or {}).items() if k != name}


def final_dtype(model: PreTrainedModel) -> Callable[[str, Tensor], torch.dtype]:
    """The dtype a parameter or buffer has once loaded: some stay fp32 in a bf16 model."""
    plan = model._get_dtype_plan(model.dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), dtype) for glob, dtype in plan.items()]

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return next((dtype for pattern, dtype in patterns if pattern.search(name)), tensor.dtype)

    return dtype_of


def generation_config(model: PreTrainedModel, folder: Path) -> GenerationConfig | None:
    """The checkpoint's generation config, as `from_pretrained` takes it; None if the user has set another one.

    Raises   CheckpointError if there is one that cannot be read
    """
    if not (model.can_generate() and (folder / "generation_config.json").is_file()):
        return None
    if model.generation_config != GenerationConfig.from_model_config(model.config):
        return None
    beside.check_config(folder / "generation_config.json")
    try:
        found = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers' own code on somebody's file
        raise CheckpointError(f"{folder}/generation_config.json cannot be used: {error}") from error
    if fault := config_values.token_fault(found):
        raise CheckpointError(f"{folder}/generation_config.json: {fault}. Correct it.")
    return found


def quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What `config.json` says about the weights that are stored, as a dict; None if it says nothing."""
    found = _quantization_config(config)
    return plugin.stored(found) if found and plugin.is_ours(found) else found


def said_of_us(config: PreTrainedConfig) -> KTInjectConfig | None:
    """What `config.json` says of rules and devices; None if it says nothing. Raises PlanError."""
    found = _quantization_config(config)
    return KTInjectConfig.of_file(found) if found and plugin.is_ours(found) else None


def _quantization_config(config: PreTrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found is not None and not isinstance(found, Mapping):
            found = found.to_dict() if hasattr(found, "to_dict") else {"quant_method": found}
        if found:
            return dict(found)
    return None


def drop_quantization(config: PreTrainedConfig) -> None:
    """The weights are floats now: what is saved or reloaded must not claim otherwise."""
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)


def read_config(path: str | os.PathLike[str], checkpoint: Checkpoint | None = None) -> PreTrainedConfig:
    """Read the config.json of a model folder or beside a file. Never runs code.

    Of a GGUF file without one it is the metadata; and where config.json is that of a model with a tower for images,
    of which GGUF keeps the language model.

    checkpoint   what `path` holds, open
    Raises       CheckpointError
    """
    folder = path if os.path.isdir(path) else Path(path).parent
    if checkpoint is None or not checkpoint.states_formats:
        return _config_in(folder)
    config = _config_in(folder) if os.path.isfile(os.path.join(folder, "config.json")) else None
    if config is None or config.get_text_config(decoder=True) is not config:
        config = _stated(path, checkpoint)
    drop_quantization(config)  # it speaks of other files
    config.name_or_path = os.fspath(path)
    return config


def _stated(path: str | os.PathLike[str], checkpoint: Checkpoint) -> PreTrainedConfig:
    """The config that the files' metadata make."""
    values = checkpoint.config_values()
    assert values is not None, "a container that states formats states configs, or refuses"
    beside.check_counts(values, os.fspath(path))
    try:
        found: PreTrainedConfig = AutoConfig.for_model(**values)
    except Exception as error:  # transformers' own code on somebody's values
        raise CheckpointError(
            f"{os.fspath(path)}: transformers {transformers.__version__} makes no {values['model_type']} config of its "
            f"metadata: {str(error).splitlines()[0][:200]}. Put the config.json of the original model beside the file, "
            "or install a newer transformers."
        ) from error
    return found


def _config_in(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    file = Path(folder) / "config.json"
    if os.path.lexists(file):
        beside.check_config(file)
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' own code on somebody's file
        raise CheckpointError(f"{folder}: its config.json cannot be used: {error}") from error
    if (aside := beside.modelopt_config(Path(folder))) and _quantization_config(found) is None:
        found.quantization_config = aside
    return found


def meta_model(
    config: PreTrainedConfig, dtype: str | torch.dtype | None = None, checkpoint: Checkpoint | None = None
) -> PreTrainedModel:
    """Build the language model of a config, with what else its class has, on the meta device: it takes no memory.

    dtype       None or "auto": what the config says, else what most of the checkpoint is, else torch's default
    Raises      PlanError
    """
    compat.require("loading")
    config, others = writing_part(config)
    make = functools.partial(auto_class(config).from_config, trust_remote_code=False)
    model = build_on_meta(make, config, dtype, checkpoint)
    if others:
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *others,
        }
    return model


def build_on_meta(
    make: Callable[..., PreTrainedModel],
    config: PreTrainedConfig,
    dtype: str | torch.dtype | None = None,
    checkpoint: Checkpoint | None = None,
) -> PreTrainedModel:
    """What `make(config, dtype=…)` gives on the meta device; for the rest, see `meta_model`."""
    if dtype is None or dtype == "auto":
        dtype = config.dtype or config.get_text_config().dtype or _usual_dtype(checkpoint)
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize > 1):
        raise PlanError(f"dtype: found {dtype!r}; use auto, bfloat16, float16 or float32.")
    try:
        with building.alone(), torch.device("meta"), _few_modules():
            return make(config, dtype=found)
    except Exception as error:  # transformers' own code on somebody's values
        raise PlanError(f"model type {config.model_type!r}: the config makes no model: {error}") from error


def unswapped(folder: str | os.PathLike[str], **arguments: Any) -> PreTrainedModel:
    """The model of a folder as transformers alone loads it, of the class that `meta_model` builds.

    arguments  of `from_pretrained`
    """
    whole = _config_in(folder)
    if said_of_us(whole) is not None:  # else transformers would hand the folder to our quantiser, which swaps
        stored = quantization(whole)
        drop_quantization(whole)
        if stored:
            whole.quantization_config = stored
    config, _ = writing_part(whole)
    found: PreTrainedModel = auto_class(config).from_pretrained(
        folder, config=config, trust_remote_code=False, **arguments
    )
    return found


@contextmanager
def _few_modules() -> Iterator[None]:
    """Stop a config that makes more modules than any model has, whatever the number is called that says so."""
    thread, count = threading.get_ident(), 0

    def registered(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES:,} modules")

    hook = compat.register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def _usual_dtype(checkpoint: Checkpoint | None) -> torch.dtype:
    """The dtype in which most of a checkpoint is stored; bf16 for one whose weights are quantised."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values() if checkpoint else ():
        sizes[info.dtype] += info.bytes
    if not sizes:
        return torch.get_default_dtype()
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return known.get(max(sizes, key=sizes.__getitem__), torch.bfloat16)
