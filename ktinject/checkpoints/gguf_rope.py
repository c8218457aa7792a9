"""The rope in GGUF's metadata as transformers' rope_parameters.

Source: `set_gguf_parameters` of `TextModel` in llama.cpp's conversion/base.py; transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from typing import Any

from ktinject.checkpoints.gguf_said import Config, Said
from ktinject.errors import shown


def rope(said: Said, **more: Any) -> Config:
    """rope_parameters; `more` goes into them."""
    found: Config = {"rope_type": "default", "rope_theta": said.real("rope.freq_base", 10_000.0), **more}
    kind = said.metadata.get(f"{said.name}.rope.scaling.type", "none")
    said.must("rope.scale_linear", 1.0)
    if kind == "linear":
        found |= {"rope_type": "linear", "factor": said.real("rope.scaling.factor")}
    elif kind == "yarn":
        said.must("rope.scaling.yarn_ext_factor", 1.0)
        found |= {
            "rope_type": "yarn",
            "factor": said.real("rope.scaling.factor"),
            "original_max_position_embeddings": said.count("rope.scaling.original_context_length"),
            "beta_fast": said.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": said.real("rope.scaling.yarn_beta_slow", 1.0),
        }
        for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
            if (factor := said.real(key, None)) is not None:
                found["attention_factor"] = factor
    elif kind != "none":
        said.wrong.append(f"{said.name}.rope.scaling.type is {shown(kind)}")
    return found


def whole_rope(said: Said, head_dim: int) -> Config:
    said.must("rope.dimension_count", head_dim)
    return rope(said)


def partial_rope(said: Said, head_dim: int) -> Config:
    return rope(said, partial_rotary_factor=said.count("rope.dimension_count", head_dim) / head_dim)


def llama3(said: Said, config: Config, factors: list[float]) -> None:
    """Find the rope scaling of Llama 3 whose factors these are; the file has no other trace of it.

    Source: the rope type "llama3" of transformers and llama.cpp
    """
    if not all(1 <= factor < 2**31 for factor in factors):
        said.wrong.append("rope_freqs.weight has factors that are not from 1 on")
        return
    rope = config["rope_parameters"]
    theta, width = rope["rope_theta"] or 10_000.0, 2 * len(factors)
    factor = float(f"{max(factors, default=1.0):.7g}")
    for low, high, length in ((1.0, 4.0, 8192), (1.0, 1.0, 8192)):
        wanted = [
            _llama3_factor(2 * math.pi * theta ** (i / width), factor, low, high, length)
            for i in range(0, width, 2)
        ]
        if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(wanted, factors)) and width == config.get(
            "head_dim"
        ):
            rope |= {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
            return
    said.wrong.append("rope_freqs.weight scales the rope in a way that the metadata does not say")


def _llama3_factor(wave: float, factor: float, low: float, high: float, length: int) -> float:
    if wave < length / high:
        return 1.0
    if wave > length / low or low == high:
        return factor
    smooth = (length / wave - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
