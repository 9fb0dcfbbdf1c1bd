"""Split masters: bfloat16 weights and the bits they lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..fused import join, split
from ..sharding import held_here, placed_like
from ._entry import Entry
from ._exchange import become, rebuild_reducers
from ._whole import Masters


class SplitMasters(Masters):
    """Masters of bfloat16 parameters without float32 copies: 16 bits beside each weight, of which it is the upper part.

    Together they are the float32 number, exactly (`fused.split`). A weight written from outside keeps the bits below
    its precision, as nobody knows what it was before.
    """

    split = True

    def __init__(self) -> None:
        super().__init__()
        self._bits: dict[Parameter, Tensor] = {}

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a bfloat16 one with bits beside it."""
        weight, bits = _split(parameter.data)
        become(parameter, weight)
        self._keep(name, parameter, bits)

    def adopt(self, name: str, parameter: Parameter, master: Tensor | None = None) -> None:
        """Keep bits for a parameter that is bfloat16 already: zeros, or those that were kept for it (int16)."""
        if parameter.dtype is not torch.bfloat16:
            raise OptimizerError(
                f"master='split' keeps the lower half of float32 beside bfloat16 weights, and a parameter is "
                f"{parameter.dtype}: use master='float32'"
            )
        self._keep(name, parameter, torch.zeros_like(parameter, dtype=torch.int16) if master is None else master)

    def _keep(self, name: str, parameter: Parameter, bits: Tensor) -> None:
        self._know(parameter, Entry(name, bits, parameter.data, self._agreed.add(parameter)))
        self._bits[parameter] = bits

    def of(self, parameter: Parameter) -> Tensor:
        """The bits beside a parameter, int16."""
        return self._bits[parameter]

    def _follow(self, parameter: Parameter, entry: Entry) -> None:
        """Note where a parameter lies that was given other data."""
        self._note(parameter, entry)

    def refresh_before_step(self, parameters: Sequence[Parameter], *, again: bool = False) -> None:
        """The same: a weight and its bits always agree."""
        self.refresh(parameters)

    def _in_float32(self, parameter: Parameter, entry: Entry) -> Tensor:
        """Made for the purpose."""
        return _join(parameter.data, self._bits[parameter])

    def _publish(self, parameters: Sequence[Parameter], lazily: bool) -> None:
        """Split the float32 data again."""
        for parameter in parameters:
            entry = self._entries[parameter]
            weight, bits = _split(entry.master)
            if not lazily or not torch.equal(held_here(entry.low), held_here(weight)):
                entry.low.copy_(weight)
            entry.master = self._bits[parameter].copy_(bits)

    def restore(self) -> None:
        """Give every parameter float32 data for good."""
        self.swap_out()
        self.refresh()
        for parameter, entry in self._entries.items():
            become(parameter, self._in_float32(parameter, entry))
        rebuild_reducers(self._entries)
        self._entries.clear()
        self._forget_columns()
        self._bits.clear()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master) pairs in float32, made for the purpose."""
        self.refresh()
        for parameter, entry in self._entries.items():
            yield entry.name, _join(entry.low, self._bits[parameter])

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take float32 masters by name. `StateError`, changing nothing, if not fitting."""
        self._loaded, self.rounded = False, None
        self.full()
        try:
            super()._check_fit(state)
            for parameter, entry in self._entries.items():
                parameter.data.copy_(state[entry.name])
        finally:
            self.low()


def _split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """`fused.split`, of DTensors too."""
    weight, bits = split(held_here(wide))
    shape = tuple(wide.shape)
    return placed_like(wide, weight, shape), placed_like(wide, bits, shape)


def _join(weight: Tensor, bits: Tensor) -> Tensor:
    """`fused.join`, of DTensors too."""
    return placed_like(weight, join(held_here(weight), held_here(bits)), tuple(weight.shape))
