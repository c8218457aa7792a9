"""What `chat`, `serve` and `convert` begin with: a model that is loaded, from a folder or from the Hub's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktinject.cli import options

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(
    model: str,
    rules: str | None,
    device: list[str] | None,
    budget: list[str] | None,
    dtype: str,
    variables: list[str] | None,
    plugins: list[str] | None,
    context: int | None = None,
    cache: str = "off",
    ignore: list[str] | None = None,
) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
    """What the options ask for: how the model is called, the model, its tokenizer. Raises as `ktinject.load`."""
    import ktinject
    from ktinject.hf import hub

    options.load_plugins(plugins)
    folder, name = hub.find(model)
    config = options.read_config(folder)
    tokenizer = options.load_tokenizer(folder)
    arguments = options.arguments(config, rules, variables, device, budget, context, ignore)
    loaded = ktinject.load(folder, dtype=dtype, cache="auto" if cache == "auto" else None, **arguments)
    return name, loaded, tokenizer
