"""Prompts with pictures: a model's own processor makes of messages and files what `generate` takes.

A message is {"role": …, "content": text}, and may have "images": paths of pictures, which stand before its text.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PreTrainedModel

from ktinject.checkpoints import beside
from ktinject.errors import CheckpointError, PlanError
from ktinject.hf import templates

_INSTALL = "pip install 'ktinject[images]'"
_CONFIGS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def check_reads(model: PreTrainedModel) -> None:
    """Raises PlanError if a model, on meta or not, reads text alone."""
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        raise PlanError(
            f"{type(model).__name__} reads text alone. Ask without a picture, or name a model that reads pictures."
        )


def load_processor(path: Path) -> Any:
    """The processor in a model folder, with its template. Raises CheckpointError, or PlanError for what to install."""
    folder = path if path.is_dir() else path.parent
    beside.check_tokenizer(folder)
    for name in _CONFIGS:
        if (folder / name).exists():
            beside.check_config(folder / name)
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' own code on somebody's files
        if absent := [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]:
            raise PlanError(
                f"{folder}: its processor of pictures cannot be made without {' and '.join(absent)}: {_INSTALL}"
            ) from error
        raise CheckpointError(
            f"{folder}: its processor of pictures cannot be used: {_first_line(error)} "
            "Put the model's processor and tokenizer files into the folder."
        ) from error
    # transformers gives a tokenizer where there is no processor.
    has_images = getattr(processor, "image_processor", None) is not None
    if not has_images or not processor.chat_template:
        lacks = "chat template" if has_images else "processor of pictures"
        raise CheckpointError(
            f"{folder}: there is no {lacks}. Put the model's preprocessor_config.json or processor_config.json, and "
            "its chat template, into the folder."
        )
    return processor


def read_picture(file: Path) -> Any:
    """A picture as PIL has it. Raises PlanError."""
    if not file.is_file():  # transformers would take it for an address or for base64
        raise PlanError(f"{file}: there is no such file. Name a picture, such as a .png or .jpg file.")
    try:
        from transformers.image_utils import load_image

        return load_image(str(file))
    except ImportError as error:
        raise PlanError(f"{file}: no picture can be read without PIL: {_INSTALL}") from error
    except Exception as error:  # Pillow's own code on somebody's file
        raise PlanError(
            f"{file}: it cannot be read as a picture: {_first_line(error)} Name a .png or .jpg file."
        ) from error


def encode(processor: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, Any]]:
    """A conversation that is to be answered: token ids, and what `generate` takes beside them.

    Raises  PlanError for a picture that cannot be read, or that the processor refuses; TemplateError
    """
    templates.check_ends(
        processor,
        [
            {
                "role": message["role"],
                "content": [
                    *({"type": "image"} for _ in message.get("images", ())),
                    {"type": "text", "text": message["content"]},
                ],
            }
            for message in messages
        ],
    )
    asked = [
        {
            "role": message["role"],
            "content": [
                *({"type": "image", "image": read_picture(Path(file))} for file in message.get("images", ())),
                {"type": "text", "text": message["content"]},
            ],
        }
        for message in messages
    ]
    try:
        found = processor.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    except Exception as error:  # the processor's own code, on pictures and a template from elsewhere
        said = f"{type(error).__name__}: {_first_line(error)}"
        raise PlanError(f"{type(processor).__name__} refuses these pictures: {said} Take others.") from error
    more = {name: value for name, value in found.items() if name not in ("input_ids", "attention_mask")}
    return found["input_ids"][0].tolist(), more


def placed(more: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """What `encode` gives beside ids where a model takes it: on its device, numbers with fractions in its dtype."""

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(model.device, model.dtype if value.is_floating_point() else None)

    return {name: of(value) for name, value in more.items()}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(". ") + "."
