"""Operators of other distributions: the entry points of the group `ktinject.operators`.

    [project.entry-points."ktinject.operators"]
    fused_rms_norm = "my_package.norms"

An entry point has the operator's name, and names the module that registers it. The module is imported when a rule names
the operator, or when all operators are listed. So a broken distribution stops only those who name its operators.
"""

from __future__ import annotations

import functools
from importlib import metadata

from ktinject.errors import OperatorError
from ktinject.operators.base import REGISTRY, Operator

GROUP = "ktinject.operators"


def operator_named(name: str) -> type[Operator] | None:
    """The operator of this name, imported from the distribution that has it; None if there is none.

    Raises   OperatorError, naming the distribution, if it cannot be imported, or if the name is taken twice
    """
    points = installed().get(name, ())
    if len(points) > 1:
        raise OperatorError(
            f"operator {name!r} is in several distributions: {', '.join(map(_of, points))}. Uninstall all but one."
        )
    for point in points:
        if name not in REGISTRY:
            _load(point)
        elif _package(REGISTRY[name].__module__) != _package(point.module):
            taken = f"{REGISTRY[name].__module__}.{REGISTRY[name].__qualname__}"
            raise OperatorError(
                f"operator {name!r} of the distribution {_of(point)} is already {taken}. Uninstall the distribution, "
                "or have its operator renamed."
            )
    return REGISTRY.get(name)


def load_all() -> None:
    """Import the operators of all distributions. Raises OperatorError, as `operator_named`."""
    for name in installed():
        operator_named(name)


@functools.cache
def installed() -> dict[str, tuple[metadata.EntryPoint, ...]]:
    """Operator → the entry points that name it, sorted; what is installed later is not seen."""
    found: dict[str, tuple[metadata.EntryPoint, ...]] = {}
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: (point.name, _of(point))):
        found[point.name] = (*found.get(point.name, ()), point)
    return found


def distribution_of(module: str) -> str | None:
    """The name of the distribution that a module is from; None if it is from no installed one."""
    names = metadata.packages_distributions().get(_package(module))
    return ", ".join(sorted({*names})) if names else None


def _load(point: metadata.EntryPoint) -> None:
    where = f"operator {point.name!r} of the distribution {_of(point)}"
    before = dict(REGISTRY)
    try:
        point.load()
    except MemoryError:
        raise
    except Exception as error:
        # What it registered before it failed would be refused as taken, if it were imported again.
        REGISTRY.clear()
        REGISTRY.update(before)
        text = str(error) if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"
        raise OperatorError(
            f"{where}: importing {point.value} failed: {text.rstrip('.')}. Correct or uninstall the distribution."
        ) from error
    if point.name not in REGISTRY:
        raise OperatorError(
            f"{where}: {point.value} registers no operator of this name. Correct the distribution: the name of an "
            "entry point is that of its operator."
        )


def _of(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _package(module: str) -> str:
    return module.partition(".")[0]
