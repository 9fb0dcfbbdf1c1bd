"""Steps of bfloat16 weights that lose no updates: on split masters, and by stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .bits import chances_like, join, round_stochastically, split
from .dispatch import Backends, dispatch
from .foreach import gate_of
from .storage import RoundedOptions, Storage, Tensors


@dataclass(frozen=True, slots=True)
class Kinds:
    """An algorithm's step for each kind of parameters. Its kernel takes all of them; the reference is put around."""

    plain: Backends
    """For float32 parameters, and for 16-bit ones with states of their dtype."""
    _split: Backends = field(init=False)
    _stochastic: Backends = field(init=False)

    def __post_init__(self) -> None:
        for name, reference in (("_split", self._on_split), ("_stochastic", self._rounded)):
            made = Backends(reference, self.plain.triton, elementwise=False, low=True)
            object.__setattr__(self, name, made)

    def dispatch(self, storage: Storage, gradients: Tensors, o: RoundedOptions) -> None:
        """Step by the fastest implementation for these parameters."""
        if storage.bits:
            dispatch(storage, gradients, o, self._split)
        elif o.stochastic_rounding and storage.params[0].dtype is torch.bfloat16:
            dispatch(storage, gradients, o, self._stochastic)
        else:
            dispatch(storage, gradients, o, self.plain)

    def _on_split(self, storage: Storage, gradients: Tensors, o: RoundedOptions) -> None:
        """Join, step, split."""
        assert storage.bits is not None
        gate = gate_of(storage.params[0].device, o.found)
        if gate is None:
            return
        masters = [join(weight, bits) for weight, bits in zip(storage.params, storage.bits, strict=True)]
        chances: list[Tensor | None] = [None] * len(masters)
        if storage.bits[0].dtype is torch.int8:
            assert storage.step is not None
            chances = [chances_like(each, o.seed, storage.step + 1, i) for i, each in enumerate(masters)]
        dispatch(Storage(masters, storage.states, storage.step), gradients, o, self.plain)
        halves = [split(each, storage.bits[0].dtype, own) for each, own in zip(masters, chances, strict=True)]
        gate.write(storage.params, [weight for weight, _ in halves])
        gate.write(storage.bits, [bits for _, bits in halves])

    def _rounded(self, storage: Storage, gradients: Tensors, o: RoundedOptions) -> None:
        """Widen, step, round."""
        assert storage.step is not None
        gate = gate_of(storage.params[0].device, o.found)
        if gate is None:
            return
        wide = [param.to(torch.float32) for param in storage.params]
        taken = storage.step + 1
        dispatch(Storage(wide, storage.states, storage.step), gradients, o, self.plain)
        rounded = [round_stochastically(each, chances_like(each, o.seed, taken, i)) for i, each in enumerate(wide)]
        gate.write(storage.params, rounded)
