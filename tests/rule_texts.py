"""Rules as text, and what their refusals have in common, for the tests of the rule language."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from ktinject import rules
from ktinject.errors import RuleError

MIB = 1 << 20
# Rules begin at line 4.
HEAD = "version: 1\nvariables: {experts: int4, size: 128}\nrules:\n"

FAMILIES = {
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "deepseek_v2": "deepseek-v2",
    "qwen3_moe": "qwen3-moe",
    "qwen2_moe": "qwen2-moe",
    "mixtral": "mixtral",
    "glm4_moe": "glm4-moe",
    "gpt_oss": "gpt-oss",
    "qwen3_5_moe_text": "qwen3-next",
    "qwen3_next": "qwen3-next",
}

DESIGN_EXAMPLE = r"""
# yaml-language-server: $schema=rules.schema.json
version: 1
model_types: [deepseek_v3, kimi_k2]
variables: {experts: int4, deferred: 2}
rules:
  - name: routed experts
    match:
      path: 'model\.layers\.\d+\.mlp\.experts'
      class: DeepseekV3Experts
      layers: 3-60
    replace:
      operator: hybrid_experts
      weights: ${variables.experts}
      gpu_experts: auto
  - name: keep the router exact
    match: {path: '.*\.mlp\.gate'}
    replace: keep
    optional: true
"""


@dataclass(frozen=True)
class Experts:
    """Arguments as `cpu_experts` has them."""

    device: str = "auto"
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    group_size: Literal[128, 64, 32] = 128
    kernel: str = "auto"
    numa: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.kernel == "never":
            raise ValueError("kernel 'never' does not run int4; use another one.")


@dataclass(frozen=True)
class Everything:
    """One argument for each kind of annotation."""

    needed: str
    ratio: float = 0.5
    symmetric: bool = True
    gpu_experts: int | float | Literal["auto"] | str = 0
    per_layer: list[int] | None = None
    profile: Optional[str] = None  # noqa: UP045
    mixed: list[int | Literal["auto"]] | Literal["none"] = "none"


@contextmanager
def refused(*words: str, at: str = "") -> Iterator[None]:
    """RuleError that begins with the place, has the words, and ends with what to do as a sentence."""
    with pytest.raises(RuleError) as error:
        yield
    text = str(error.value)
    assert text.startswith(at), text
    for word in words:
        assert word in text, text
    assert "; " in text and text.rstrip()[-1] in ".?", text


@contextmanager
def quick(seconds: float = 1.0) -> Iterator[None]:
    """In processor time, of which machines that do other things take up to twice as much; five times are allowed."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 5 * seconds


def rule(match: str = "{path: x}", replace: str = "keep", name: str = "r") -> str:
    return f"- name: {name}\n  match: {match}\n  replace: {replace}\n"


def parse(text: str | bytes) -> rules.RuleSet:
    return rules.parse(text if isinstance(text, bytes) else text.encode(), "f")


def read_rule(match: str = "{path: x}", replace: str = "keep", head: str = HEAD) -> rules.Rule:
    return parse(head + rule(match, replace)).rules[0]
