"""What a norm computes: RMS norms, with a weight or without, and layer norms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ktinject.generation.cpu import openmp
from ktinject.operators.probes import norm
from ktinject.operators.probes.norm import LayerNormSpec, RmsNormSpec
from ktinject.support import Support


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm, or a layer norm, and what it computes.

    has_weight  False: an RMS norm whose weight is 1 throughout
    """

    path: str
    rms: RmsNormSpec | LayerNormSpec
    has_weight: bool = True


@openmp.one_thread()
def of_norm(module: nn.Module) -> NormSpec | Support:
    """The spec of an RMS norm or a layer norm, with an empty path."""
    found: RmsNormSpec | LayerNormSpec | Support = norm.probe(module)
    if isinstance(found, Support):
        centred = norm.probe_centred(module)
        found = found if isinstance(centred, Support) else centred
    return found if isinstance(found, Support) else NormSpec("", found)


def norm_at(module: nn.Module, name: str, size: int = 0) -> NormSpec | Support:
    """The spec of a child. size: of its weight, if it may have none."""
    child = module.get_submodule(name)
    if size and not [*child.parameters()]:
        epsilon = norm.probe_without_weight(child, size)
        if isinstance(epsilon, Support):
            return Support.no(f"{name}: {epsilon.reason}")
        return NormSpec(name, RmsNormSpec(size, epsilon, False, True), has_weight=False)
    found = of_norm(child)
    return Support.no(f"{name}: {found.reason}") if isinstance(found, Support) else replace(found, path=name)
