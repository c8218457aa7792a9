"""The rotations of a step, as a model gives them to its layers: one for all, or one for each kind of layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktinject.generation import frequencies
from ktinject.generation.cpu.native_parts import UnknownLayer

# Positions that these are found for at once.
_AHEAD = 64

# cos and sin [b, n, …] of each kind of layer that turns something; empty where none does.
Rotation = list[tuple[Tensor, Tensor]]


class Rotations:
    """Gives the rotation of positions [b, n]. The first step compares it with what the model's layers are given."""

    def __init__(
        self, rotary: Any, config: Any, x: Tensor, named: Sequence[str] = (), widened: Sequence[str] = ()
    ) -> None:
        """rotary: the model's rotary embedding, or None. x [1, 1, hidden]. Raises UnknownLayer.

        named    of layers that find theirs themselves among those of all kinds: its name
        widened  kinds whose rotation the model asks for in fp32
        """
        self._rotary, self._axes, self._widened = rotary, 0, widened
        text = config.get_text_config()
        types = [*named] or getattr(text, "layer_types", None) or []
        # Of models that have one for each kind of layer: the kinds that have one, and each layer's; -1: none.
        self._by_kind = (
            rotary is not None and "layer_type" in inspect.signature(type(rotary).forward).parameters
        )
        self._names: list[str] = []
        if self._by_kind:
            given = getattr(text, "rope_parameters", None) or {}
            self._names = [name for name in sorted({*types}) if given.get(name, given) is not None]
            if len(types) != text.num_hidden_layers:
                raise UnknownLayer(
                    f"its config has {len(types)} layer_types, the model {text.num_hidden_layers} layers"
                )
        self._kind = [self._names.index(name) if name in self._names else -1 for name in types]
        buffers = ["_".join((name, "inv_freq")) for name in self._names] if self._by_kind else ["inv_freq"]
        self._frequencies = [
            getattr(rotary, name, torch.empty(0, dtype=torch.float32, device="cpu")).shape[-1]
            for name in buffers
        ]
        try:
            found = self._find_axes(x)
        except (TypeError, AttributeError, KeyError) as error:
            name = type(rotary).__name__
            raise UnknownLayer(f"its {name} is called in another way: {error}") from None
        # Whether the two values of an angle lie beside each other, as Cohere has them; of angles of 0 nothing shows.
        turned = self(x, torch.ones(1, 1, dtype=torch.int64, device="cpu"))
        self._interleaved = [_is_interleaved(cos, n) for (cos, _), n in zip(turned, self._frequencies)]
        self._widths = [self._doubled(one, kind)[0].shape[-1] for kind, one in enumerate(found)]
        self._count = _AHEAD if self._goes_by_position(x) else 1

    def _find_axes(self, x: Tensor) -> Rotation:
        """How the rotary embedding takes positions: that of text and images needs three in some versions."""
        positions = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        try:
            return self(x, positions)
        except IndexError:
            self._axes = 3
            return self(x, positions)

    def __call__(self, x: Tensor, positions: Tensor) -> Rotation:
        if self._rotary is None:
            return []
        if self._axes:
            positions = positions.expand(self._axes, *positions.shape)
        if self._by_kind:
            wide = x.float() if self._widened else x
            given = [wide if name in self._widened else x for name in self._names]
            return [parts_of(self._rotary(one, positions, name)) for one, name in zip(given, self._names)]
        return [parts_of(self._rotary(x, positions))]

    @property
    def turns(self) -> bool:
        """Whether some layer turns by what the model gives it."""
        return bool(self._widths)

    def ahead(self, x: Tensor, first: int) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin [n, all columns] of positions first to first + n - 1: so many as can be told from one call."""
        return self._table(x, first, self._count)

    def _table(self, x: Tensor, first: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        positions = torch.arange(first, first + count, device="cpu")[None]
        return self.side_by_side(self(x, positions), 0)

    def _goes_by_position(self, x: Tensor) -> bool:
        """Whether many positions at once give what each of them alone gives."""
        if self._rotary is None or not frequencies.goes_by_position(self._rotary):
            return False
        many = self._table(x, 0, _AHEAD)
        return all(_are_rows(many, at, self._table(x, at, 1)) for at in (0, 1, _AHEAD // 2 - 1, _AHEAD - 1))

    def of_layer(self, rotation: Rotation, index: int) -> tuple[Tensor, Tensor] | None:
        """What a layer is given."""
        kind = self._kind[index] if self._by_kind else 0
        return rotation[kind] if rotation and kind >= 0 else None

    def given(self, rotation: Any, index: int) -> Any:
        """What a layer takes of what it is given: that of its kind, where there are those of all."""
        if isinstance(rotation, dict) and self._by_kind:
            kind = self._kind[index]
            rotation = rotation.get(self._names[kind]) if kind >= 0 else None
        return parts_of(rotation)

    def columns(self, index: int) -> tuple[int, int]:
        """Where what a layer turns by begins in `side_by_side`, and how many columns it has; (0, -1): all."""
        if not self._by_kind:
            return 0, -1
        kind = self._kind[index]
        if kind < 0:
            return 0, 0
        return sum(self._widths[:kind]), self._widths[kind]

    def interleaves(self, index: int) -> bool:
        """Whether a layer is given the two values of an angle beside each other."""
        kind = self._kind[index] if self._by_kind else 0
        return bool(self._interleaved) and kind >= 0 and self._interleaved[kind]

    def side_by_side(self, rotation: Rotation, row: Any) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin [b, all columns] of a token or a row."""
        if not rotation:
            return None, None
        kinds = [self._doubled((cos[row], sin[row]), kind) for kind, (cos, sin) in enumerate(rotation)]
        # Of those in two dtypes, both are in fp32 then.
        cos, sin = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1) for parts in zip(*kinds))
        return cos.contiguous(), sin.contiguous()

    def _doubled(self, rotation: tuple[Tensor, Tensor], kind: int) -> tuple[Tensor, Tensor]:
        """cos and sin twice side by side, also where the model gives each of them once, or two of each together."""
        cos, sin = rotation
        if self._interleaved[kind]:
            cos, sin = cos[..., ::2], sin[..., ::2]
        if cos.shape[-1] == self._frequencies[kind]:
            return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
        return cos, sin


def _are_rows(tables: Sequence[Tensor | None], at: int, rows: Sequence[Tensor | None]) -> bool:
    return all(
        table is not None and row is not None and torch.equal(table[at : at + 1], row)
        for table, row in zip(tables, rows)
    )


def _is_interleaved(cos: Tensor, frequencies: int) -> bool:
    """Whether cos [1, 1, n] has each angle's two values beside each other."""
    if cos.shape[-1] != 2 * frequencies or frequencies < 2:
        return False
    a, b = cos[..., :frequencies], cos[..., frequencies:]
    return not torch.equal(a, b) and torch.equal(cos[..., ::2], cos[..., 1::2])


def parts_of(rotation: Any) -> Any:
    """cos and sin of a rotation by complex numbers, as DeepSeek-V2 has it; any other one as it is."""
    if isinstance(rotation, Tensor) and rotation.is_complex():
        return rotation.real, rotation.imag
    return rotation
