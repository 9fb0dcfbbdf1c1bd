"""Compares the values of parameters and masters: a write through `parameter.data` leaves no other trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import PreampWarning
from ..sharding import held_here
from .leaves import Leaf, Leaves

FIRST, EVERY = 4, 32
"""How many steps at the start of training compare parameters with their masters; later one in so many does."""

PILE = 2**24
"""Elements that an accelerator compares at once: one by one BERT-large's 394 tensors took 0.1 s on an H200."""


class Audit:
    """Compares parameters with their masters: at first, now and then, and always once it has found a write."""

    def __init__(self) -> None:
        self._steps, self.always = 0, False
        self._flags: list[FlagOnItsWay] = []

    def due(self, leaves: Leaves) -> bool:
        """Whether to compare before the next step: it is its turn, or the one parameter looked at has been written.

        Each step looks at one parameter, for writes to all of them now and then; not where that takes a host sync.
        """
        step = self._steps
        self._steps += 1
        if self.always or step < FIRST or step % EVERY == 0:
            return True
        at = step % max(1, len(leaves.parameters))
        here = leaves.parameters and leaves.parameters[at].device.type == "cpu"
        return bool(here) and not agrees(leaves.parameters[at], leaves.leaves[at])

    def read_flags(self) -> None:
        """Read the flags of earlier comparisons that have arrived from the device by now."""
        for flag in [each for each in self._flags if each.ready()]:
            self._flags.remove(flag)
            self._warn(flag.name if flag.here else None)

    def written(self, pairs: Sequence[tuple[Parameter, Leaf]]) -> Iterator[tuple[Parameter, Leaf]]:
        """Find parameters that were written through `.data`; on an accelerator their masters are updated here."""
        if pairs and pairs[0][0].device.type != "cpu":
            self._on_device(pairs)
            return
        found = [(parameter, leaf) for parameter, leaf in pairs if not agrees(parameter, leaf)]
        yield from found
        self._warn(found[0][1].name if found else None)

    def _warn(self, written: str | None) -> None:
        if written is not None and not self.always:
            self.always = True
            warnings.warn(
                f"{written} was written through .data, which leaves no trace, so every step has to compare parameters "
                "with their float32 masters from now on, and what is written there has 16 bits. Write through the "
                "parameter itself, `with torch.no_grad(): p.clamp_(...)`; exchange whole weights (averages, say) "
                "inside `with session.full_precision(values_only=True):`, where they are float32",
                PreampWarning,
                stacklevel=2,
            )

    def _on_device(self, pairs: Sequence[tuple[Parameter, Leaf]]) -> None:
        """Compare and update without a host sync: the flag is read once it has arrived."""
        differ = []
        sides = [(held_here(leaf.stored), held_here(parameter.data)) for parameter, leaf in pairs]
        piles = [end // PILE for end in accumulate(low.numel() for _, low in sides)]
        for _, pile in groupby(zip(sides, piles, strict=True), lambda one: (one[1], one[0][1].device, one[0][1].dtype)):
            masters, lows = zip(*(side for side, _ in pile), strict=True)
            wide, low = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in (masters, lows))
            kept = _rounds_to(wide, low)
            parts = torch.where(kept, wide, low.float()).split(list(map(Tensor.numel, masters)))
            torch._foreach_copy_(masters, [part.view_as(m) for part, m in zip(parts, masters, strict=True)])
            differ.append(~kept.all())
        if self.always or not differ:  # known already
            return
        names = ", ".join(leaf.name for _, leaf in pairs[:3])
        found = torch.stack([one.to(differ[0].device) for one in differ]).any()  # stages may be on several devices
        self._flags.append(FlagOnItsWay(f"one of {names}, ...", found))


def agrees(parameter: Parameter, leaf: Leaf) -> bool:
    """Whether a parameter has the values that its master rounds to; a host sync."""
    low, master = held_here(parameter.data), held_here(leaf.stored)
    return torch.equal(low, master.to(low.dtype)) or bool(_rounds_to(master, low).all())


def _rounds_to(master: Tensor, low: Tensor) -> Tensor:
    """Which entries of a parameter its master rounds to; NaN equals NaN here."""
    rounded = master.to(low.dtype)
    return (low == rounded) | (low.isnan() & rounded.isnan())


class FlagOnItsWay:
    """A flag on its way from an accelerator to the host."""

    def __init__(self, name: str, flag: Tensor) -> None:
        self.name = name
        self.here = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=flag.device.type == "cuda")
        self.here.copy_(flag, non_blocking=True) if flag.device.type != "meta" else self.here.zero_()
        self._event = torch.Event(flag.device) if flag.device.type != "meta" else None
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """Whether it has arrived; no host sync."""
        return self._event is None or bool(self._event.query())
