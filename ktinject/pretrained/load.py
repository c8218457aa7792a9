"""`from_pretrained` with our config: the class and the config are transformers', everything else is `optimize`."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ktinject.checkpoints import beside
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError, PlanError, shown
from ktinject.hf import compat, hub, models
from ktinject.hf.plugin import KTInjectConfig
from ktinject.optimize import optimize
from ktinject.pretrained import arguments
from ktinject.pretrained.arguments import Arguments


def from_pretrained(
    cls: type[PreTrainedModel],
    name: str | os.PathLike[str] | None,
    asked: KTInjectConfig,
    *model_args: Any,
    config: PreTrainedConfig | str | os.PathLike[str] | None = None,
    **given: Any,
) -> Any:
    """Load a model of a class as `asked` says. Takes what transformers' own takes, and refuses what it cannot honour.

    Returns  the model in evaluation mode; `model.ktinject` is the plan, `model.config.quantization_config` what
             `save_pretrained` writes so that the folder loads in the same way
    Raises   as `optimize`
    """
    compat.require("loading", "from_pretrained")
    saved = asked.whole()  # a file of rules is read before anything else is
    read = arguments.read(asked, **given)
    if model_args:
        raise PlanError(
            f"from_pretrained: found {shown(model_args)} after the name; nothing is allowed there."
        )
    # Models are built on meta and filled where the plan says, whatever the caller's default is.
    with torch.device("cpu"):
        path = _path(name, read)
        with Checkpoint.open(path, with_adapter=read.adapter is not None) as checkpoint:
            settled = _config(cls, path, config, read)
            settled.name_or_path = os.fspath(name or path)
            _say_what_is_stored(settled, asked, checkpoint)
            make = functools.partial(cls._from_config, **read.making)
            model = models.build_on_meta(make, settled, read.dtype, checkpoint)
            optimize(
                model,
                asked.rules,
                checkpoint=checkpoint,
                devices=read.devices,
                budget=read.budget,
                progress=transformers_logging.is_progress_bar_enabled(),
                variables=asked.variables,
                check_tensors=asked.check_tensors,
                tp=asked.tp,
                context=asked.context,
                ignore=asked.ignore or (),
                cache=asked.cache,
            )
    if read.generation_config is not None:
        model.generation_config = model.generation_config.from_dict(read.generation_config.to_dict())
    model.config.quantization_config = saved
    if read.adapter is not None:
        folder, adapter_name, more = read.adapter
        model.load_adapter(folder, adapter_name=adapter_name, adapter_kwargs=more)
    return (model, _report()) if read.with_report else model


def _path(name: str | os.PathLike[str] | None, read: Arguments) -> Path:
    """The folder or file to read. Raises PlanError or CheckpointError."""
    if name is None:
        raise PlanError(
            "from_pretrained: found None; a folder or a name is needed, whose weights are loaded."
        )
    path = Path(name)
    if not path.exists():
        gguf = None if read.gguf_file is None else f"{read.subfolder}/{read.gguf_file}".lstrip("/")
        path = hub.download(os.fspath(name), gguf, **read.hub)
    path = path / read.subfolder
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder. Name one with config.json and weights.")
    if read.adapter is None:
        beside.refuse_adapter(path)
    return path / read.gguf_file if read.gguf_file else path


def _config(
    cls: type[PreTrainedModel],
    path: Path,
    config: PreTrainedConfig | str | os.PathLike[str] | None,
    read: Arguments,
) -> PreTrainedConfig:
    """A config of the caller's own, with the values that the call gives. Raises CheckpointError or PlanError."""
    if isinstance(config, PreTrainedConfig):
        settled, unknown = copy.deepcopy(config), read.values
    else:
        folder = Path(config) if config is not None else path if path.is_dir() else path.parent
        if (folder / "config.json").exists():
            beside.check_config(folder / "config.json")
        try:
            settled, unknown = cls.config_class.from_pretrained(
                folder, return_unused_kwargs=True, **read.values
            )
        except Exception as error:  # transformers' own code on somebody's file
            raise CheckpointError(f"{folder}: its config.json cannot be used: {error}") from error
    if unknown:
        raise PlanError(
            f"from_pretrained: found {', '.join(map(shown, unknown))}, which are neither arguments that ktinject "
            f"knows nor values of {type(settled).__name__}. Correct the name, or leave it out."
        )
    return settled


def _say_what_is_stored(config: PreTrainedConfig, asked: KTInjectConfig, checkpoint: Checkpoint) -> None:
    """Leave in a config what it says of the weights on disk, and nothing of ours. Raises PlanError."""
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    there = models.quantization(config) or beside.modelopt_config(folder)
    given = None if asked.stored is None else dict(asked.stored)
    if there is not None and given is not None and there != given:
        raise PlanError(
            f"KTInjectConfig: stored={shown(given)}, and config.json says {shown(there)} of the weights. Leave "
            "`stored` out."
        )
    models.drop_quantization(config)
    if (there or given) and not checkpoint.states_formats:
        config.quantization_config = there or given


def _report() -> dict[str, Any]:
    """What transformers says with output_loading_info: anything else than nothing has been refused."""
    empty: dict[str, Any] = {name: set() for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return {**empty, "error_msgs": [], "conversion_errors": {}}
