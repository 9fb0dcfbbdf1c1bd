"""The optimizer wrapper of 2018: a loss scale for each loss, `optimizer.scale_loss(loss)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._scaler import LossScaler


class OptimWrapper:
    """An optimizer together with the scales of the `num_loss` losses that are scaled, in turn, before each step.

    `scale_loss(loss)` once per loss, then `step()`, which does nothing once if any gradient was not finite. Everything
    else is the wrapped optimizer's.
    """

    def __init__(self, optimizer: Any, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_idx = 0
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        """Yield the next loss times its scale; afterwards its gradients are unscaled and added to those before."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= len(self._loss_scaler):
            raise RuntimeError(
                f"scale_loss was called more than {len(self._loss_scaler)} times before step(): say how many losses "
                "there are, handle.wrap_optimizer(optimizer, num_loss=...)"
            )
        scaler = self._loss_scaler[self._loss_idx]
        with self._amp_handle._scaled(loss, scaler, [self._optimizer], self._loss_idx) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer, without casts; after an overflow say so instead. No closures: NotImplementedError."""
        if closure is not None:
            raise NotImplementedError(
                "a wrapped optimizer's step takes no closure: its gradients would be scaled. Call step() after "
                "`with optimizer.scale_loss(loss) as scaled_loss: scaled_loss.backward()`"
            )
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer" or name.startswith("__"):  # while unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
