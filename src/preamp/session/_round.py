"""What the loss scales have to learn: which losses ran, what was found in their gradients, and when to tell the scales.

A scale learns once a round: after `step()` of all optimizers, or, when they are stepped one by one, at the next
backward pass of its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from ..kernels import Reading, multiply_
from ._gradients import GradientBook
from ._losses import Losses
from ._parameters import gradients_of


class Round:
    """The losses and optimizers of a session between the first backward and the last step."""

    def __init__(self, losses: Losses, book: GradientBook, optimizers: Sequence[Optimizer]) -> None:
        self._losses, self._book, self._optimizers = losses, book, list(optimizers)
        self._ran: set[str] = set()
        self._stepped: set[Optimizer] = set()
        self._due: dict[str, tuple[Reading, bool | None]] = {}
        self._records: dict[Optimizer, dict[str, Reading]] = {}

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

    def record(self, name: str, readings: dict[Optimizer, Reading]) -> None:
        """What a loss with a scale of its own gave each optimizer."""
        for optimizer, reading in readings.items():
            record = self._records.setdefault(optimizer, {})
            record[name] = record[name].merged(reading) if name in record else reading

    def void(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients were thrown away: what was found in them teaches nothing."""
        self._records.pop(optimizer, None)

    def void_zeroed(self) -> None:
        """`void` for every optimizer whose gradients were set to None behind the session's back."""
        for optimizer in self._optimizers:
            if not gradients_of(optimizer):
                self.void(optimizer)

    def stepped(self, chosen: Sequence[Optimizer], reading: Reading, known: bool | None) -> None:
        """Optimizers have stepped, or skipped: `reading` of their gradients, and `known` if the host knows which."""
        self._stepped.update(chosen)
        if not self._losses.apart:
            for name in self._ran:
                self._owe(name, reading, known)
        for optimizer in chosen:
            for name, own in self._records.pop(optimizer, {}).items():
                self._owe(name, own, bool(own.found) if own.found.device.type == "cpu" else None)
        if len(chosen) == len(self._optimizers):
            self._ran.clear()

    def _owe(self, name: str, reading: Reading, known: bool | None) -> None:
        if name in self._due:
            earlier, sure = self._due[name]
            reading = earlier.merged(reading)
            known = None if known is None or sure is None else known or sure
        self._due[name] = (reading, known)

    def settle(self, name: str | None, offender: Callable[[], str | None]) -> None:
        """Let the scale of a loss (None: every scale) learn. May raise `ScaleCollapse`, naming `offender()`."""
        for each in [due for due in self._due if name in (None, due)]:
            reading, known = self._due.pop(each)
            self._ran.discard(each)
            outstanding = [] if self._losses.apart else [o for o in self._optimizers if o not in self._stepped]
            outstanding = [o for o in outstanding if not self._book.has_read(o)]
            device = reading.found.device
            before = self._losses[each].current(device) if outstanding else None
            try:
                self._losses.after_step(each, reading, known, offender)
            finally:
                if before is not None:  # they go on accumulating: bring their gradients to the new scale
                    ratio = self._losses[each].current(device) / before
                    for optimizer in outstanding:
                        multiply_(gradients_of(optimizer), ratio)
        self._stepped.clear()

    def clear(self) -> None:
        """Forget everything; nothing is learnt."""
        self._ran.clear()
        self._stepped.clear()
        self._due.clear()
        self._records.clear()

    def forget_backward(self) -> None:
        """All gradients were zeroed: the passes that made them teach nothing any more."""
        self._ran.clear()
