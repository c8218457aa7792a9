"""What there is to replace and to replace it with: the modules of a model, and the operators with their arguments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ktinject import machine
from ktinject.errors import PlanError
from ktinject.operators import REGISTRY, Operator, plugins
from ktinject.operators.probes.roles import Roles
from ktinject.rules.wording import did_you_mean, listing, ranges

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


@dataclass(frozen=True)
class ModuleKind:
    """Modules of a model that are alike and whose paths differ in numbers alone.

    path       with the numbers in braces: model.layers.{3-60}.mlp.experts
    class_name of the modules
    roles      what rules can call them
    count      how many there are
    bytes      of the parameters and buffers of all of them, with what lies inside them, in the model's dtype
    operators  that take such a module by their default arguments, on a machine with a GPU
    """

    path: str
    class_name: str
    roles: tuple[str, ...]
    count: int
    bytes: int
    operators: tuple[str, ...]


def modules(model: PreTrainedModel) -> list[ModuleKind]:
    """All modules that hold tensors of their own or have a role, in the order of the model, which may be on meta."""
    roles = Roles(model)
    here = dataclasses.replace(machine.detect(), cuda_built=True)
    alike: dict[tuple[Any, ...], list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        found = roles.of(path) if path else ()
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if found or (path and own):
            shapes = tuple((name, tensor.shape) for name, tensor in module.state_dict().items())
            alike.setdefault((_NUMBER.sub("{}", path), type(module), found, shapes), []).append(
                (path, module)
            )
    return [
        ModuleKind(
            path=_pattern([path for path, _ in group]),
            class_name=kind.__name__,
            roles=found,
            count=len(group),
            bytes=sum(_bytes(module) for _, module in group),
            operators=tuple(_takers(group[0][1], here)),
        )
        for (_, kind, found, _), group in alike.items()
    ]


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _pattern(paths: Sequence[str]) -> str:
    """Paths that differ in numbers alone as one: the numbers of each place, in braces where they differ."""
    columns = zip(*(map(int, _NUMBER.findall(path)) for path in paths))
    shown = ["{" + ranges({*column}) + "}" if len({*column}) > 1 else str(column[0]) for column in columns]
    values = iter(shown)
    return _NUMBER.sub(lambda _: next(values), paths[0])


def _takers(module: nn.Module, here: machine.Machine) -> Iterator[str]:
    """The operators that take a module where they compute."""
    plugins.load_all()
    for name, operator in sorted(REGISTRY.items()):
        if operator.replaces and _takes(operator, module, here):
            yield name


def _takes(operator: type[Operator], module: nn.Module, here: machine.Machine) -> bool:
    try:
        config: Any = operator.Config()
    except TypeError:
        return False  # it has arguments without a default, so nobody can say
    if config.device == "auto":
        device = "cpu" if "cpu" in operator.device_types else "cuda:0"
        config = dataclasses.replace(config, device=device)
    resolved = operator.resolve(module, config)
    if resolved is None:
        return False
    taker, config = resolved
    return taker.supports(module, config, here) is None


@dataclass(frozen=True)
class Argument:
    """An argument that a rule gives to an operator.

    allowed   its type as rules write it: bf16 | int8
    default   None: it has none
    """

    name: str
    allowed: str
    default: Any
    meaning: str


def operator_named(name: str) -> type[Operator]:
    """An operator that rules can name. Raises PlanError; OperatorError for one that cannot be imported."""
    found = plugins.operator_named(name)
    if found is None:
        known = {*REGISTRY, *plugins.installed()}
        raise PlanError(
            f"operator {name!r}: there is none of this name; there are {listing(sorted(known), 'and')}. "
            f"Name one of them, or give --plugin with what registers it.{did_you_mean(name, known)}"
        )
    return found


def summary(operator: type[Operator]) -> str:
    """The first paragraph of an operator's docstring, on one line."""
    return " ".join((inspect.getdoc(operator) or "").partition("\n\n")[0].split())


def arguments(operator: type[Operator]) -> list[Argument]:
    """What a rule can give to an operator, with the comments that its Config has beside the fields, or above them."""
    comments = dict(_comments(reversed(operator.Config.__mro__[:-1])))
    types = typing.get_type_hints(operator.Config)  # an alias as what it stands for
    return [
        Argument(field.name, _allowed(types[field.name]), _default(field), comments.get(field.name, ""))
        for field in dataclasses.fields(operator.Config)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _allowed(annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return " | ".join(map(_allowed, typing.get_args(annotation)))
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def _comments(configs: Iterable[type]) -> Iterator[tuple[str, str]]:
    for config in configs:
        try:
            source = inspect.getsource(config)
        except (OSError, TypeError):  # a class that was made at run time
            continue
        found = re.findall(r"((?:^    # .*\n)*)^    (\w+): .*?(?:  # (.*))?$", source, re.M)
        for above, name, behind in found:
            yield name, _phrase(behind or " ".join(re.findall("# (.*)", above)))


def _phrase(comment: str) -> str:
    """A comment above a field is a sentence; in a table all are phrases."""
    return re.sub(r"^[A-Z](?=[a-z])", lambda found: found[0].lower(), comment).removesuffix(".")
