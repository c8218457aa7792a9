"""The one way in which a swapped model's class is changed: methods of ours are put before those of its own class."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn


def put_before(model: Any, methods: type[Methods]) -> None:
    """Make a model an instance of a subclass of its class, of the same name, where those methods come first."""
    ours, own = _MADE.get(type(model), ((), type(model)))
    model.__class__ = _class_of(methods, *ours, own)


def own_class(model: Any) -> Any:
    """The class that a model had before `put_before`."""
    return next((_MADE[kind][1] for kind in type(model).__mro__ if kind in _MADE), type(model))


def stored_state(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of what PyTorch holds, without the weights in operators that a swapped model's own has."""
    found: dict[str, Any] = nn.Module.state_dict(model)
    return found


def stored_parameters(model: nn.Module) -> Iterator[Tensor]:
    """The parameters that PyTorch holds, without the weights in operators that a swapped model's own gives."""
    return (parameter for _, parameter in nn.Module.named_parameters(model))


# A class that `put_before` made → the classes whose methods come first, and the model's own.
_MADE: dict[type, tuple[tuple[type, ...], Any]] = {}


@cast(Any, functools.cache)
def _class_of(*bases: Any) -> Any:
    *ours, own = bases
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    made = type(own.__name__, bases, names)
    _MADE[made] = tuple(ours), own
    return made


class Methods:
    """What `put_before` puts before a model's own class derives from this."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the model's own class, and decodes so; operators refuse a deep one, but there may be none."""
        own = own_class(self)
        _, _, state, *rest = own.__reduce_ex__(self, protocol)
        state = {name: value for name, value in state.items() if name != "ktinject_decoding"}
        return object.__new__, (own,), state, *rest
