"""The arguments of transformers' `from_pretrained`: each is honoured or refused.

transformers takes what it does not know for a value of the config, or of the model's class. So every name that it knows
is listed here, and a new one of a later version is refused as an unknown value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from ktinject.errors import PlanError, shown
from ktinject.hf.plugin import KTInjectConfig

# Where the files are, as `huggingface_hub` takes them.
_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "tqdm_class")
# What the model is built with.
_MAKING = ("attn_implementation", "experts_implementation")
# Without meaning here: of downloads, of the caller, of old versions, of how transformers' own loader reads files, or
# about code that comes with a checkpoint, which was run before if at all.
_MEANINGLESS = (
    "_commit_hash _from_auto _from_pipeline _fast_init adapter_name code_revision disable_mmap from_flax from_tf "
    "local_files_only low_cpu_mem_usage mirror offload_state_dict proxies trust_remote_code user_agent weights_only"
).split()
# What is refused unless it says nothing, and what to do.
_OF_RULES = "Leave it out: rules and devices of KTInjectConfig say what is where."
_REFUSED = {
    "allow_all_kernels": "Leave it out: operators take the place of kernels.",
    "device_mesh": "Give KTInjectConfig(tp=True) to the processes of torchrun.",
    "distributed_config": "Give KTInjectConfig(tp=True) to the processes of torchrun.",
    "fusion_config": "Leave it out: operators take the place of fused modules.",
    "ignore_mismatched_sizes": "Leave it out: a tensor of another size is refused.",
    "kernel_config": "Leave it out: operators take the place of kernels.",
    "key_mapping": "Rename the tensors of the checkpoint, and save it so.",
    "offload_buffers": _OF_RULES,
    "offload_folder": _OF_RULES,
    "state_dict": "Save the weights to a folder, or call ktinject.optimize on a model that has them.",
    "tp_plan": "Give KTInjectConfig(tp=True) to the processes of torchrun.",
    "tp_size": "Give KTInjectConfig(tp=True) to the processes of torchrun.",
    "use_kernels": "Leave it out: operators take the place of kernels.",
    "variant": "Put the files of the variant into a folder, under the names that transformers has for them.",
}


@dataclass
class Arguments:
    """What a call asks for.

    dtype              "auto" unless it says another
    devices, budget    as `ktinject.optimize` takes them
    making             what the model is built with
    hub, subfolder, gguf_file    where its files are
    generation_config  in place of the checkpoint's
    adapter            a folder or name of an adapter for PEFT, and what to call it
    with_report        the caller gets transformers' report of loading, too
    values             of the config
    """

    dtype: str | torch.dtype
    devices: Any
    budget: Any
    making: dict[str, Any]
    hub: dict[str, Any]
    subfolder: str
    gguf_file: str | None
    generation_config: GenerationConfig | None
    adapter: tuple[str, str, dict[str, Any]] | None
    with_report: bool
    values: dict[str, Any] = field(default_factory=dict)


def read(asked: KTInjectConfig, **given: Any) -> Arguments:
    """Read what `from_pretrained` was given beside the name and the config. Raises PlanError."""
    for name, advice in _REFUSED.items():
        value = given.pop(name, None)
        if value is not None and value is not False and value != "":
            raise PlanError(f"from_pretrained: {name}={shown(value)} means nothing with ktinject. {advice}")
    if given.pop("use_safetensors", None) is False:
        raise PlanError(
            "from_pretrained: use_safetensors=False: only safetensors and GGUF are read. Leave it out."
        )
    old, dtype = given.pop("torch_dtype", None), given.pop("dtype", None)
    adapter, name = dict(given.pop("adapter_kwargs", None) or {}), given.get("adapter_name", "default")
    path = adapter.pop("_adapter_model_path", None)
    found = Arguments(
        dtype=dtype or old or "auto",
        devices=_devices(given.pop("device_map", None), asked),
        budget=_budget(given.pop("max_memory", None), asked),
        making={name: given.pop(name) for name in _MAKING if given.get(name) is not None},
        hub={name: given[name] for name in _HUB if given.get(name) is not None},
        subfolder=given.pop("subfolder", None) or "",
        gguf_file=given.pop("gguf_file", None),
        generation_config=given.pop("generation_config", None),
        adapter=None if path is None else (path, name, adapter),
        with_report=bool(given.pop("output_loading_info", False)),
    )
    found.values = {
        name: value for name, value in given.items() if name not in (*_HUB, *_MEANINGLESS, *_MAKING)
    }
    return found


def _devices(device_map: Any, asked: KTInjectConfig) -> Any:
    """The devices that a `device_map` names, together with ours. Raises PlanError where they contradict."""
    if device_map is None:
        around = torch.get_default_device()  # of `with torch.device(...)`
        if around.type == "meta":
            raise PlanError(
                "from_pretrained: the default device is meta, and weights are to be loaded. Leave torch.device('meta')."
            )
        device_map = None if around.type == "cpu" else around
    if isinstance(device_map, Mapping) and len(device_map) == 1 and "" in device_map:
        device_map = device_map[""]
    if device_map is None or device_map == "auto":
        return asked.devices
    if isinstance(device_map, int) and not isinstance(device_map, bool) and device_map >= 0:
        device_map = f"cuda:{device_map}"
    named = str(device_map) if isinstance(device_map, str | torch.device) else None
    if named is None or named.partition(":")[0] not in ("cpu", "cuda"):
        raise PlanError(
            f"from_pretrained: device_map={shown(device_map)}; allowed is auto or one device, such as cuda:0. For "
            "several name them: KTInjectConfig(devices=['cuda:0', 'cuda:1']); layers are then spread over them."
        )
    if asked.devices is not None and [_full(named)] != [
        _full(str(device)) for device in _listed(asked.devices)
    ]:
        raise PlanError(
            f"from_pretrained: device_map={named!r} contradicts devices={shown(asked.devices)} of KTInjectConfig. "
            "Give one of them."
        )
    return named


def _listed(devices: Any) -> list[Any]:
    return [devices] if isinstance(devices, str) else list(devices)


def _full(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


def _budget(max_memory: Any, asked: KTInjectConfig) -> Any:
    """A `max_memory` as a budget. Raises PlanError if there is one already."""
    if max_memory is None:
        return asked.budget
    if asked.budget is not None:
        raise PlanError("from_pretrained: max_memory, and budget of KTInjectConfig. Give one of them.")
    if not isinstance(max_memory, Mapping):
        raise PlanError(f"from_pretrained: max_memory={shown(max_memory)}; it maps devices to sizes.")
    return {f"cuda:{name}" if isinstance(name, int) else name: size for name, size in max_memory.items()}
