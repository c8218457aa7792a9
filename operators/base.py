"""What an operator is: the contract between the engine and the modules it swaps in.

An operator takes the place of one module of the model and keeps its call signature. It holds no `Parameter` and
no buffer of its own: its weights live in a native object, filled piece by piece from the checkpoint. What it keeps of
the module, a child (a router) or a parameter (a norm's weight), stays under its old name, and transformers loads that
as it always did.

To plan, the engine calls `plan_placement` for all modules of an operator at once. For each module it then calls
`resolve`, `supports` and `build`, `place` if something was placed, and `describe`, `footprint`, `parameter_shapes` and
`workspace`. It may plan for several devices, and `place` an operator that it has built more than once.

When the plan stands, the engine builds and places each operator anew, and calls `allocate`, `load` for every piece, and
`finish`. When the operator takes the module's place it calls `stand_for`: from then on the operator answers for the
module's public attributes and weights (stand_in.py). When all operators are in the model it calls `connect`.

An operator without weights of its own defines `supports`, `build` and `forward`; everything else has a default. One
that takes weights defines `parameter_shapes`, `load`, `describe` and `footprint`, too.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, Self, TypeVar

from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.stand_in import StandIn

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored
    from ktinject.checkpoints.packed import PackedWeights
    from ktinject.machine import Machine


@dataclass(frozen=True)
class Config:
    """The arguments of an operator in a rule; subclassed per operator, the annotations check the YAML."""

    device: str = "auto"  # where the operator computes; auto: the planner decides

    @property
    def other_devices(self) -> tuple[str, ...]:
        """Devices that the arguments name beside `device`; the planner refuses them as it refuses that."""
        return ()

    @property
    def auto_sized(self) -> bool:
        """Whether the operator takes what the rest of the plan leaves of a device."""
        return False

    @property
    def gives_back(self) -> bool:
        """Whether the operator lets go of what it took so when somebody else needs it, see offload/lent.py."""
        return False


@dataclass(frozen=True)
class Placement:
    """What `plan_placement` settles for one module; subclassed by operators that have something to settle."""


class PendingOutput(Protocol):
    """An output that a layer's operator leaves for the next layer's, beside the hidden states, within a pass."""

    def detach(self) -> Tensor | None:
        """Wait for the pending output and give it away; None: nothing is pending."""

    def attach(self, tensor: Tensor) -> None:
        """Take it back as a tensor on the next layers' device."""


class Operator(StandIn, ABC):
    """Base of all operators; see the module's docstring for the order of calls."""

    name: ClassVar[str]  # set by `register_operator`
    Config: ClassVar[type] = Config
    replaces: ClassVar[bool] = True  # False only for `keep`
    # Where it can compute, preferred first; the planner refuses others. `device: auto` is where the layer stands, if
    # that is among them. Inputs may come from another device, and what it keeps of the module stands with the layer.
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    # Dimension 0 of every parameter is the expert: `load` gets one expert at a time.
    per_expert: ClassVar[bool] = False
    # `load` and `load_stored` may be called by several threads at once, for different pieces, and none of them starts
    # threads: then a piece is packed by the thread that read it.
    packs_alone: bool = False
    # What `load_stored` takes as a checkpoint has it: `Format.encoding` of ktinject/checkpoints/formats/.
    native_formats: tuple[str, ...] = ()
    # Weights come through `load_stored` alone, so `misfit_of` is asked about those in other formats, too.
    takes_stored_only: bool = False
    keeps: ClassVar[tuple[str, ...]] = ()  # direct children it keeps; rules may replace what is inside these
    # Of a tensor-parallel process group: each rank has one; the first has it and sends the others what it computes; or
    # none can have it.
    on_ranks: ClassVar[Literal["each", "first", "none"]] = "each"
    # forward, given CUDA tensors, only enqueues work: no host synchronisation, and nothing on the host that a replay
    # of a CUDA graph would miss. Decode is captured only if all operators of a model say so.
    # Derived classes that override something must say so themselves.
    capturable: bool = False
    # Attributes that the operator changes itself after it is finished, and whose change a recorded step may miss.
    changing: ClassVar[frozenset[str]] = frozenset()
    # Shared by all operators that leave outputs for each other; it crosses stage boundaries.
    pending_output: PendingOutput | None = None
    # The class of the module that it replaced, and the forward that this class had then.
    stood_for: tuple[type[nn.Module], Any] | None = None
    # Values that an attention caches for a token; None: as many as the module that it replaces.
    kv_values_per_token: int | None = None

    @classmethod
    def plan_placement(
        cls,
        decoder: nn.Module,
        modules: Mapping[str, tuple[nn.Module, Any]],
        spare: Mapping[str, int],
    ) -> Mapping[str, Placement | str]:
        """Settle what depends on other modules or on the memory that is left; most operators have nothing to settle.

        decoder  the module that owns the decoder layers, not yet changed
        modules  path → module and config of all that rules give to this operator, in the order of the model
        spare    device → bytes that may be used on top. Empty at first; if a config says `auto_sized`, the engine asks
                 again when it knows what everything else takes
        Returns  path → what `place` gets, or the reason why the module cannot be replaced, as `supports` words it.
                 Paths without anything to settle are left out
        """
        return {}

    # transformers may not initialise what it finds here: weights are none of its business.
    _is_hf_initialized = True

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        """The arguments for a weight that the checkpoint has in one of its `native_formats`."""
        return config

    @classmethod
    def weight_formats(cls, config: Any, stored: Collection[tuple[str, Format]]) -> Sequence[tuple[int, Any]]:
        """The configs that may take the place of one that leaves the weight format open (`weights: auto`).

        stored   parameter name and format of what the checkpoint has for the module; empty without a checkpoint
        Returns  rank and config, the most accurate first: ranks rise, and rules of one plan step down them together.
                 Empty: the config leaves nothing open
        """
        return ()

    @classmethod
    def resolve(cls, module: nn.Module, config: Any) -> tuple[type[Operator], Any] | None:
        """The operator that takes this module on the config's device, with its config; None: the module stays.

        Asked before `supports`, which the operator named here then answers.
        """
        return cls, config

    @classmethod
    @abstractmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        """The reason why this module cannot be replaced, as a sentence without its full stop, or None.

        One about an argument of the rule begins with its name: "kernel 'amx_int8' cannot run here".
        """

    @classmethod
    @abstractmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        """An operator for `module`, which may be on meta. Allocates nothing big and changes nothing.

        config   an instance of `cls.Config` whose `device` is resolved: "cpu" or "cuda:<n>"
        """

    def place(self, placement: Placement) -> None:
        """Take what `plan_placement` settled for this module. Called before `allocate`, in a plan more than once."""
        raise OperatorError(
            f"{self.name}: plan_placement settled {type(placement).__name__}, and the class does not define place. "
            "Correct the operator."
        )

    def describe(self) -> dict[str, Any]:
        """What will run, for the plan: "kernel", "weights", and anything that is not what was asked for."""
        return {"kernel": self.name, "weights": "kept"}

    def footprint(self) -> dict[str, int]:
        """Bytes per device after `finish`, exact, known before anything is allocated.

        What the operator keeps of the module does not count: it is in the plan where it stands.
        """
        return {}

    def workspace(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Buffers that operators share while the model runs: (device, what for) → bytes, the least and those wanted.

        Operators that name the same buffer share it. Its size is the largest that any of them wants. Where memory is
        short it is smaller, but never below the largest minimum.
        """
        return {}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """What `load` takes: parameter name relative to the replaced module → shape of the parameter."""
        return {}

    def takes_codes(self, name: str) -> bool:
        """Whether `load_stored` gets a parameter that a checkpoint has in one of the `native_formats`.

        A matrix, or one of each expert. A bias is a number for each output, whatever blocks a file has it in: `load`
        gets it decoded.
        """
        return len(self.parameter_shapes().get(name, ())) - self.per_expert >= 2

    def allocate(self) -> None:
        """Take the memory. Called once, after every refusal has had its chance."""

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        """Take one piece of the parameter `name`, in any order; pack it and keep no reference to it.

        tensor   on the CPU, in the checkpoint's float dtype
        expert   the index along dimension 0 that the tensor is; None: all of them
        part     which of the parts concatenated along the output dimension (0 gate, 1 up); None: all of them
        """
        raise OperatorError(f"{self.name}: {name}: it takes no weights; transformers loads what it keeps.")

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        """As `load`, with a weight as the checkpoint stores it; called for its `native_formats` only."""
        raise NotImplementedError

    def misfit_of(self, name: str, source: Format, part: int | None) -> str | None:
        """Why `load_stored` would not take a piece of the parameter `name`, as `supports` words it; for the plan.

        source   how the checkpoint stores it: one of its `native_formats`
        part     as `load_stored` would get it
        """
        return None

    def packed_weights(self) -> PackedWeights | None:
        """Where all that the operator holds of its weights lies, for files of packed weights; None: it is not kept.

        Called after `allocate`. Such a file is then read there, in place of all calls of `load`, and `restored` is
        called; or it is written from there after the last `load`.
        """
        return None

    def restored(self, state: Mapping[str, str]) -> None:
        """Called when the memory that `packed_weights` named was filled from a file.

        state   what `PackedWeights.state` was when the file was written
        """
        raise NotImplementedError

    def keeping(self, source: Format) -> str:
        """What becomes of the values of a quantised weight, for the plan: "kept", "exact" or "quantised again".

        source   how the checkpoint stores it
        """
        if source.is_taken(self.native_formats):
            return "kept"
        weights = getattr(getattr(self, "config", None), "weights", "bf16")
        if weights in source.exact_in:
            return "exact"
        return "rounded to bf16" if weights == "bf16" else "quantised again"

    def finish(self) -> None:
        """Called after the last `load`. Raises OperatorError if something is absent."""

    @classmethod
    def connect(cls, decoder: nn.Module, operators: Sequence[Self]) -> None:
        """Called once when the model stands, with all operators of this class in its order.

        decoder  the module that owns the decoder layers; hooks set on it go away if the swap is undone
        """

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        """The dequantised fp32 weights of `name` (of one expert), for tests, gradients and saving."""
        raise OperatorError(f"{self.name}: {name} cannot be unpacked; this operator keeps no way back.")

    def is_lossless(self) -> bool:
        """Whether `unpack`, rounded to the dtype that was loaded, gives what was loaded bit by bit."""
        return not self.parameter_shapes()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise OperatorError(
            f"{self.name}: a swapped module cannot be pickled, its weights live outside of PyTorch. "
            "Keep the checkpoint folder and the rules, and call ktinject.load in the other process."
        )


class NeverBuilt(Operator):
    """An operator that rules name and no plan holds: the module stays, or `resolve` says who takes it."""

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        return None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.name} is never built")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name} is never built")


REGISTRY: dict[str, type[Operator]] = {}

# What an operator that takes weights defines; the defaults are for one that takes none.
_WITH_WEIGHTS = ("parameter_shapes", "load", "describe", "footprint")

AnyOperator = TypeVar("AnyOperator", bound=type[Operator])


def register_operator(name: str) -> Callable[[AnyOperator], AnyOperator]:
    """Class decorator: make an operator known to rules as `operator: <name>`.

    Raises OperatorError if the name is missing, taken or odd, or the class does not keep the contract
    """
    if not isinstance(name, str):
        given = name.__name__ if isinstance(name, type) else repr(name)
        raise OperatorError(
            f"register_operator: found {given} in place of a name; rules name operators. "
            'Write @register_operator("my_operator") above the class.'
        )

    def register(cls: AnyOperator) -> AnyOperator:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise OperatorError(f"operator name {name!r}: use lower-case letters, digits and underscores.")
        if name in REGISTRY:
            taken = f"{REGISTRY[name].__module__}.{REGISTRY[name].__qualname__}"
            raise OperatorError(f"operator {name!r} is already {taken}. Choose another name.")
        fault = _fault(cls)
        if fault:
            raise OperatorError(f"operator {name!r}: {fault}.")
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return register


def _fault(cls: type) -> str | None:
    """How a class breaks the contract."""
    if not (isinstance(cls, type) and issubclass(cls, Operator)):
        return f"{cls!r} is not a subclass of ktinject.operators.Operator"
    if inspect.isabstract(cls):
        return f"{cls.__qualname__} does not define {', '.join(sorted(cls.__abstractmethods__))}"
    if cls.replaces and cls.forward is nn.Module.forward:
        return f"{cls.__qualname__} does not define forward"
    absent = [name for name in _WITH_WEIGHTS if getattr(cls, name) is getattr(Operator, name)]
    if absent and "parameter_shapes" not in absent:
        return f"{cls.__qualname__} takes weights (parameter_shapes) and does not define {', '.join(absent)}"
    if not (isinstance(cls.Config, type) and issubclass(cls.Config, Config) and is_dataclass(cls.Config)):
        return f"{cls.__qualname__}.Config is not a dataclass derived from ktinject.operators.Config"
    return None
