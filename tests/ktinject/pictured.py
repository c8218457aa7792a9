"""A tiny model of text and pictures in a folder with a processor that needs no torchvision, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from byte_tokenizer import tokenizer
from double import saved
from models import multimodal
from transformers import AutoModelForMultimodalLM, PreTrainedModel, PreTrainedTokenizerFast

PATCHES = 7  # in each direction, of 140 × 140 pixels: what Aria's processor makes of any picture
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|img|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(folder: Path) -> PreTrainedModel:
    """Returns the model, in bf16. Skips the test where Pillow or this model is not there."""
    pytest.importorskip("PIL")
    if "aria" not in multimodal.AVAILABLE:
        pytest.skip("this transformers has another Aria")
    from transformers import AriaImageProcessorPil, AriaProcessor

    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens={"image_token": "<|img|>"},
    )
    processor = AriaProcessor(
        AriaImageProcessorPil(), words, chat_template=TEMPLATE, size_conversion={980: 4}
    )
    processor.save_pretrained(folder)
    config = multimodal.config("aria")
    config.text_config.vocab_size = len(words)
    config.image_token_index = config.image_token_id = words.convert_tokens_to_ids("<|img|>")
    config.vision_config.image_size, config.vision_config.patch_size = 140 * PATCHES, 140
    config.projector_patch_to_query_dict = {PATCHES**2: 4}
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = None
    saved(model, folder)
    return model


def picture(file: Path, seed: int = 0) -> Path:
    """A picture of noise, 20 × 24 pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(file)
    return file
