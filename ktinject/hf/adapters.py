"""Adapters of PEFT on a model: what they are told by, and which of them recorded steps may hold.

PEFT puts a module around each layer that it adapts. It is imported by whoever makes adapters, never here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ktinject.support import SUPPORTED, Support

_PACKAGE = "peft."
# Around one linear layer: layer(x) + B(A(x)) · scaling for each adapter that acts, and nothing besides.
_LORA = ("peft.tuners.lora.layer", "Linear")


def is_part(module: nn.Module) -> bool:
    """Whether a module is PEFT's."""
    return type(module).__module__.startswith(_PACKAGE)


def is_lora_linear(module: nn.Module) -> bool:
    """Whether a module is PEFT's around a linear layer with LoRA adapters. A subclass is not."""
    return (type(module).__module__, type(module).__qualname__) == _LORA


def acting(module: Any) -> tuple[str, ...]:
    """Names of the adapters that a LoRA module adds to what its layer gives.

    None do where they are switched off, or merged into the weights.
    """
    if module.disable_adapters or module.merged:
        return ()
    return tuple(name for name in module.active_adapters if name in module.lora_A)


def is_idle(module: Any) -> bool:
    """Whether a module is PEFT's around a linear layer, and no adapter adds anything to what that gives."""
    return is_lora_linear(module) and not acting(module)


def unadapted(module: Any) -> Any:
    """The layer in a LoRA module to which no adapter adds anything; any other module as it is."""
    while isinstance(module, nn.Module) and is_idle(module):
        module = module.base_layer
    return module


def replay_support(module: Any) -> Support:
    """Whether a captured step may hold a module of PEFT's."""
    if not is_lora_linear(module):
        return Support.no(
            f"is PEFT's {type(module).__qualname__}; of adapters, captured steps hold LoRA of linear layers"
        )
    special = {
        name: type(module.lora_variant[name]).__name__
        for name in acting(module)
        if name in module.lora_variant
    }
    if special:
        name, variant = next(iter(special.items()))
        return Support.no(
            f"has the adapter {name!r} with {variant}; captured steps hold plain LoRA. Merge it"
        )
    return SUPPORTED


def trained_biases(model: Any, held: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Adapters that are to train biases which operators hold: the adapter, what its config says, and the first bias.

    held   full names of parameters that operators hold, as they are in the model now
    """
    configs = getattr(model, "peft_config", None)
    for adapter, config in (configs if isinstance(configs, dict) else {}).items():
        said = getattr(config, "bias", "none")
        if (
            said in (None, "none", False)
            or not isinstance(said, str)
            or getattr(config, "inference_mode", True)
        ):
            continue
        for name in held:
            # Of `all`, every parameter of such a name; else those of layers that PEFT has put its own around.
            if name.endswith("bias") and (said == "all" or name.endswith(".base_layer.bias")):
                yield adapter, said, name
                break


def idle_parts(model: nn.Module) -> set[nn.Module]:
    """Modules of PEFT, and what they hold, that no request runs through: of LoRA that is off or merged."""
    return {
        part
        for module in model.modules()
        if is_idle(module)
        for name, child in module.named_children()
        if name != "base_layer"
        for part in child.modules()
    }


def take_off(model: nn.Module) -> None:
    """Put the layers back that PEFT has put modules around."""
    for holder in [*model.modules()]:
        for name, child in [*holder.named_children()]:
            layer = getattr(child, "get_base_layer", None) if is_part(child) else None
            if callable(layer):
                setattr(holder, name, layer())


def lost(model: Any, held: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Adapters of which a part has found no parameter, because an operator holds it: the adapter, the parameter.

    PEFT leaves such a part out and warns, and the model would compute as if it did not exist.

    held   full names of parameters that operators hold → what holds them
    """
    configs = getattr(model, "peft_config", None)
    for adapter, config in (configs if isinstance(configs, dict) else {}).items():
        for target in sorted(getattr(config, "target_parameters", None) or ()):
            for name in held:
                if name == target or name.endswith(f".{target}"):
                    yield adapter, name
