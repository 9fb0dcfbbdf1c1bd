"""What the loss scales have to learn: which losses ran, what was found in their gradients, and when to tell the scales.

A scale learns once a round: after `step()` of all optimizers, or, when they are stepped one by one, at the next
backward pass of its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..gradients import multiply_
from ._gradients import GradientBook, gradients_of
from ._losses import Losses


class Round:
    """The losses and optimizers of a session between the first backward and the last step."""

    def __init__(self, losses: Losses, book: GradientBook, optimizers: Sequence[Optimizer]) -> None:
        self._losses, self._book, self._optimizers = losses, book, list(optimizers)
        self._ran: set[str] = set()
        self._stepped: set[Optimizer] = set()
        self._due: dict[str, tuple[Tensor, bool | None]] = {}
        self._records: dict[Optimizer, dict[str, Tensor]] = {}

    @property
    def names(self) -> list[str]:
        """The losses whose gradients a step would apply; empty when no backward came before."""
        return sorted(self._ran or self._due)

    @property
    def running(self) -> bool:
        """Whether a backward pass has run that no step of all optimizers followed."""
        return bool(self._ran)

    def ran(self, name: str) -> None:
        """A backward pass of a loss has run."""
        self._ran.add(name)

    def record(self, name: str, found: dict[Optimizer, Tensor]) -> None:
        """What a loss with a scale of its own gave each optimizer."""
        for optimizer, flag in found.items():
            record = self._records.setdefault(optimizer, {})
            record[name] = torch.maximum(record[name], flag) if name in record else flag

    def void(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients were thrown away: what was found in them teaches nothing."""
        self._records.pop(optimizer, None)

    def void_zeroed(self) -> None:
        """`void` for every optimizer whose gradients were set to None behind the session's back."""
        for optimizer in self._optimizers:
            if not gradients_of(optimizer):
                self.void(optimizer)

    def stepped(self, chosen: Sequence[Optimizer], found: Tensor, known: bool | None) -> None:
        """Optimizers have stepped, or skipped: `found` on the device, `known` on the host if it is."""
        self._stepped.update(chosen)
        if not self._losses.apart:
            for name in self._ran:
                self._owe(name, found, known)
        for optimizer in chosen:
            for name, flag in self._records.pop(optimizer, {}).items():
                self._owe(name, flag, bool(flag) if flag.device.type == "cpu" else None)
        if len(chosen) == len(self._optimizers):
            self._ran.clear()

    def _owe(self, name: str, found: Tensor, known: bool | None) -> None:
        if name in self._due:
            earlier, sure = self._due[name]
            found = torch.maximum(earlier, found.to(earlier.device))
            known = None if known is None or sure is None else known or sure
        self._due[name] = (found, known)

    def settle(self, name: str | None, offender: Callable[[], str | None]) -> None:
        """Let the scale of a loss (None: every scale) learn. May raise `ScaleCollapse`, naming `offender()`."""
        for each in [due for due in self._due if name in (None, due)]:
            found, known = self._due.pop(each)
            self._ran.discard(each)
            before = self._losses[each].current(found.device)
            try:
                self._losses.after_step(each, found, known, offender)
            finally:
                self._rescale_outstanding(self._losses[each].current(found.device) / before)
        self._stepped.clear()

    def _rescale_outstanding(self, ratio: Tensor) -> None:
        """Optimizers that did not step in this round go on accumulating: bring their gradients to the new scale."""
        if self._losses.apart:
            return
        for optimizer in self._optimizers:
            if optimizer not in self._stepped and not self._book.is_true(optimizer):
                multiply_(gradients_of(optimizer), ratio)

    def clear(self) -> None:
        """Forget everything; nothing is learnt."""
        self._ran.clear()
        self._stepped.clear()
        self._due.clear()
        self._records.clear()

    def forget_backward(self) -> None:
        """All gradients were zeroed: the passes that made them teach nothing any more."""
        self._ran.clear()
