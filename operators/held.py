"""The weights that operators hold, as tensors: what `parameters()`, `state_dict()` and `.weight` of a model give.

A `Held` has the shape and the dtype of the parameter that it stands for, and no memory. Who reads it gets the values,
unpacked anew; who writes to it, in place or to `.data`, has them packed again. So scripts that edit weights work as on
the unswapped model, and none of them is lost.

    held.mul_(0.9)      unpack ──► mul_ ──► write
    held.data = other                       write
    held[3].zero_()     unpack ──► a view of the unpacked values, which knows what it is a part of ──► zero_ ──► write
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Holder(Protocol):
    """An operator, as a held weight sees it."""

    name: ClassVar[Any]

    def unpacked(self, name: str) -> Tensor:
        """The whole weight, in the dtype of the model, as a tensor of the caller's own."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace the whole weight. Raises OperatorError."""


# What a tensor is asked without its values: getters of attributes but for these, and these methods.
_GETTERS_OF_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag", "grad_fn")
_METADATA = frozenset(
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous stride get_device "
    "storage_offset __len__ has_names is_pinned is_inference is_shared retain_grad".split()
)
# What hands out memory: the values have to live as long as the tensor that was asked.
_HANDS_OUT = frozenset(("data_ptr", "untyped_storage", "storage", "__dlpack__"))
_READ_ONLY = frozenset(("numpy", "__array__"))
_SAME = ("detach", "alias")
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Held(Tensor):
    """A weight in an operator, or a part of one. Every operation that writes to it also packs the weight again.

    Its views and its `.data` are of this class, too. Other results computed from it are plain tensors.
    """

    _holder: Holder
    _name: str
    _whole: Tensor | None  # the unpacked values, of a part, or while their memory is known to somebody
    _part: Tensor | None  # what this is of them

    @classmethod
    def of(cls, holder: Holder, name: str, shape: Any, dtype: torch.dtype, device: Any) -> Held:
        """The weight `name` of an operator. Nothing is unpacked."""
        return cls._made(holder, name, torch.Size(shape), dtype, torch.device(device))

    @classmethod
    def _made(
        cls,
        holder: Holder,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        whole: Tensor | None = None,
        part: Tensor | None = None,
    ) -> Held:
        with torch.inference_mode(False):
            found = torch.Tensor._make_wrapper_subclass(
                cls,
                shape,
                strides=None if part is None else part.stride(),
                dtype=dtype,
                device=device,
                requires_grad=False,
            )
        found._holder, found._name, found._whole, found._part = holder, name, whole, part
        return found

    @property
    def is_whole(self) -> bool:
        """Whether it is the weight itself, and not a part of it."""
        return self._part is None or self._part is self._whole

    def is_of(self, holder: object, name: str) -> bool:
        """Whether it is the weight `name` of an operator."""
        return self._holder is holder and self._name == name and self.is_whole

    def plain(self) -> Tensor:
        """The values, as a tensor of torch's own class."""
        return self._unpacked_both()[1]

    def _unpacked_both(self) -> tuple[Tensor, Tensor]:
        """The whole weight, unpacked, and what this is of it."""
        if self._whole is not None:
            assert self._part is not None
            return self._whole, self._part
        with torch.inference_mode(False), torch.no_grad():
            whole = self._holder.unpacked(self._name)
        return whole, whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_DATA:
                return _set_data(first, args[1])
            if func == _SET_REQUIRES_GRAD or name == "requires_grad_":
                return _require_grad(func, first, args[1:], kwargs)
            if isinstance(first, Held):
                getter = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
                if (getter and getter not in _GETTERS_OF_VALUES) or (not getter and name in _METADATA):
                    return func(*args, **kwargs)
                if first._whole is None and (getter == "data" or name in _SAME):
                    return cls._made(first._holder, first._name, first.shape, first.dtype, first.device)
                if name == "to" and first._whole is None and _stays(first, args[1:], kwargs):
                    return first
                if name in _HANDS_OUT or name in _READ_ONLY:
                    first._whole, first._part = first._unpacked_both()
            return _run(cls, func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Of what went past `__torch_function__`, such as the ops of a compiled graph."""
        given, _ = _plain((args, kwargs or {}))
        return func(*given[0], **given[1])

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.plain().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Held({self._name} of {self._holder.name}: {self.plain()!r})"


def _run(cls: type[Held], func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The function on the values; what it has written to is packed."""
    (plain, named), found = _plain((args, kwargs))
    result = func(*plain, **named)
    if name in _READ_ONLY and hasattr(result, "setflags"):
        result.setflags(write=False)  # what is written there nobody would see
    for one in _written(func, name, args, kwargs):
        whole, _ = found[id(one)][1]
        one._holder.write(one._name, whole)
    if not isinstance(result, Tensor):
        return result
    for one, (whole, part) in found.values():
        if result is part:
            return one
        is_plain = type(result) is Tensor
        if is_plain and result.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            return cls._made(one._holder, one._name, result.shape, result.dtype, result.device, whole, result)
    return result


def _plain(given: Any) -> tuple[Any, dict[int, tuple[Held, tuple[Tensor, Tensor]]]]:
    """Arguments with the values of each held weight in its place, and these, by the weight's id."""
    found: dict[int, tuple[Held, tuple[Tensor, Tensor]]] = {}

    def of(value: Any) -> Any:
        if isinstance(value, Held):
            if id(value) not in found:
                found[id(value)] = value, value._unpacked_both()
            return found[id(value)][1][1]
        if type(value) in (list, tuple):
            return type(value)(map(of, value))
        if type(value) is dict:
            return {key: of(item) for key, item in value.items()}
        return value

    return of(given), found


def _written(func: Any, name: str, args: Any, kwargs: Any) -> Iterator[Held]:
    """The held weights that a torch function writes to: its first argument or `out`. Judged by the function's name."""
    first = args[0] if args else next(iter(kwargs.values()), None)
    if name.startswith("__"):
        in_place = name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        )
    else:
        in_place = name.endswith("_")
    for value in ((first,) if in_place else ()) + (kwargs.get("out"),):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Held):
                yield one


def _stays(held: Held, args: Any, kwargs: Any) -> bool:
    """Whether `held.to(…)` is the same tensor: its own device and dtype, and no copy."""
    if kwargs.get("copy") or any(isinstance(value, bool) and value for value in args[2:]):
        return False
    if any(isinstance(value, Tensor) for value in args) or "memory_format" in kwargs:
        return False
    for value in (*args, kwargs.get("dtype"), kwargs.get("device")):
        if isinstance(value, torch.dtype) and value != held.dtype:
            return False
        if isinstance(value, (str, torch.device, int)) and not isinstance(value, bool):
            if torch.device(value) != held.device:
                return False
    return True


def _set_data(target: Any, data: Any) -> None:
    """`target.data = data`: the values are packed, unless they are the weight's own."""
    if not isinstance(target, Held):
        _SET_DATA(target, data.plain() if isinstance(data, Held) else data)
    elif isinstance(data, Held) and data.is_of(target._holder, target._name) and target.is_whole:
        pass
    elif target._whole is None:
        target._holder.write(target._name, data.plain() if isinstance(data, Held) else data)
    else:
        whole, part = target._unpacked_both()
        with torch.no_grad():
            part.copy_(data.plain() if isinstance(data, Held) else data)
        target._holder.write(target._name, whole)


def _require_grad(func: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """Held weights are not trained: who asks for it is told, once an operator."""
    if not isinstance(target, Held):
        return func(target, *args, **kwargs)
    if args[0] if args else kwargs.get("requires_grad", True):
        _warn_not_trained(target._holder.name)
    return target


@functools.cache
def _warn_not_trained(operator: str) -> None:
    logging.getLogger("ktinject").warning(
        "%s: requires_grad: weights in operators are not trained, and stay as they are. Train an adapter (PEFT), or "
        "train the unswapped model and swap it afterwards.",
        operator,
    )
