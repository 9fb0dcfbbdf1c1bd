"""Notices backward passes that are not the session's, whose gradients are not multiplied by its loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import SessionError
from ..ledger import Gradients, parameters_of
from ._losses import PendingScales
from ._regions import FullPrecision


class PlainBackward:
    """Looks at the first parameter of each optimizer as its gradient comes.

    A hook on each of a thousand parameters would take as long as the backward pass of a small model.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], gradients: Gradients, pending: PendingScales, full: FullPrecision
    ) -> None:
        self._gradients, self._pending, self._full = gradients, pending, full
        self.scaled_by_hand = False
        """Whether the session has given out a scaled loss, so that any backward pass may be that of such a one."""
        self._ours = 0
        self._seen: list[Any] = []
        for optimizer in optimizers:
            first = next((p for p in parameters_of(optimizer) if p.is_leaf and p.requires_grad), None)
            if first is not None:
                hook = first.register_post_accumulate_grad_hook(self._came(optimizer))
                self._seen.append((first, hook))

    def _came(self, optimizer: Optimizer) -> Any:
        def came(parameter: Parameter) -> None:
            if self._ours or self.scaled_by_hand or self._full.depth or parameter.grad is None:
                return
            if optimizer in self._gradients and self._gradients[optimizer].true:
                return
            if self._pending.running:
                raise SessionError(
                    "a loss.backward() after session.backward() has added gradients to those that are multiplied by "
                    "the loss scale, which these are not: they would vanish when they are unscaled. Write "
                    "session.backward(loss) for each loss, or session.unscale_() before it"
                )
            parameter.grad._preamp_plain = parameter.grad._version  # type: ignore[attr-defined]

        return came

    def check(self) -> None:
        """`SessionError` if gradients of another backward pass are there still, as scaled ones are about to come."""
        for parameter, _ in self._seen:
            grad = parameter.grad
            if grad is not None and getattr(grad, "_preamp_plain", None) == grad._version:
                raise SessionError(
                    "there are gradients of a loss.backward() that is not the session's, and those of "
                    "session.backward() are multiplied by the loss scale: added to them the former would vanish when "
                    "they are unscaled. Write session.backward(loss) for each loss, or clear gradients in between"
                )

    @contextmanager
    def not_so(self) -> Iterator[None]:
        """Wrap a backward pass of the session."""
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1

    def close(self) -> None:
        """Look no longer."""
        for _, hook in self._seen:
            hook.remove()
