"""Compares the values of parameters and masters: a write through `parameter.data` leaves no other trace."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import PreampWarning
from ..sharding import held_here
from .leaves import Leaf

STEPS = 4
"""The number of steps at the start of training in which parameters are compared with their masters."""


class Audit:
    """Compares parameters with their masters at the start of training, and at every step once it has found a write.

    A comparison costs a pass over the parameters.
    """

    def __init__(self) -> None:
        self._left = STEPS
        """The number of steps still to compare; -1: all."""
        self._verdicts: list[Verdict] = []

    @property
    def due(self) -> bool:
        """Whether the next step is to be compared."""
        return self._left != 0

    @property
    def over(self) -> bool:
        """Whether nothing is left to compare and to read."""
        return self._left == 0 and not self._verdicts

    def hear(self) -> None:
        """Read the verdicts of the device that have arrived by now."""
        for verdict in [v for v in self._verdicts if v.ready()]:
            self._verdicts.remove(verdict)
            self._judge(verdict.name if verdict.guilty() else None)

    def written(
        self, pairs: Sequence[tuple[Parameter, Leaf]], *, counts: bool = True
    ) -> Iterator[tuple[Parameter, Leaf]]:
        """Parameters written without a trace, for the caller to update masters; on an accelerator it is done here.

        `counts`: whether this is a step, of which `STEPS` are compared.
        """
        if counts and self._left > 0:
            self._left -= 1
        if pairs and pairs[0][0].device.type != "cpu":
            self._on_device(pairs)
            return
        found = [(parameter, leaf) for parameter, leaf in pairs if not agrees(parameter, leaf)]
        yield from found
        self._judge(found[0][1].name if found else None)

    def _judge(self, culprit: str | None) -> None:
        if culprit is not None and self._left >= 0:
            self._left = -1
            warnings.warn(
                f"{culprit} was written through .data, which leaves no trace, so every step has to compare parameters "
                "with their masters from now on. Write through the parameter itself: "
                "`with torch.no_grad(): p.clamp_(...)`",
                PreampWarning,
                stacklevel=2,
            )

    def _on_device(self, pairs: Sequence[tuple[Parameter, Leaf]]) -> None:
        """Compare and update without a host sync: the verdict is read once it has arrived."""
        differ = []
        for parameter, leaf in pairs:
            low, master = held_here(parameter.data), held_here(leaf.stored)
            kept = (low == master.to(low.dtype)) | low.isnan()
            master.copy_(torch.where(kept, master, low.float()))
            differ.append(~kept.all())
        if self._left < 0:  # known already
            return
        names = ", ".join(leaf.name for _, leaf in pairs[:3])
        found = torch.stack([one.to(differ[0].device) for one in differ]).any()  # stages may be on several devices
        self._verdicts.append(Verdict(f"one of {names}, ...", found))


def agrees(parameter: Parameter, leaf: Leaf) -> bool:
    """Whether a parameter is what its master rounds to, or NaN; a host sync."""
    low, master = held_here(parameter.data), held_here(leaf.stored)
    return bool(((low == master.to(low.dtype)) | low.isnan()).all())


class Verdict:
    """A flag on its way from an accelerator to the host."""

    def __init__(self, name: str, flag: Tensor) -> None:
        self.name = name
        self._here = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=flag.device.type == "cuda")
        self._here.copy_(flag, non_blocking=True) if flag.device.type != "meta" else self._here.zero_()
        self._event = torch.Event(flag.device) if flag.device.type != "meta" else None
        if self._event is not None:
            self._event.record()

    def ready(self) -> bool:
        """Whether it has arrived; no host sync."""
        return self._event is None or bool(self._event.query())

    def guilty(self) -> bool:
        """The flag."""
        return bool(self._here)
