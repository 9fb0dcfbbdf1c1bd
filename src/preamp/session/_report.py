"""`StepReport`: what a step did, read from the device on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class StepReport:
    """What `Session.step` did. Its fields are read from the device at first access, which is a host sync.

    A report is a value of its own: later steps do not change it.

    >>> session.backward(loss)
    >>> if not session.step().skipped:
    ...     schedule.step()
    """

    __slots__ = ("_found", "_names", "_nonfinite", "_norm", "_parts", "_scale", "index")

    def __init__(
        self, index: int, found: Tensor | bool, scale: Tensor | float, norm: Callable[[], Tensor] | float,
        nonfinite: Tensor | tuple[str, ...], names: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        self.index = index
        """Which attempt at a step this was, counted from 0."""
        self._found: Tensor | bool = found
        self._scale: Tensor | float = scale
        self._norm: Callable[[], Tensor] | float = norm
        self._nonfinite: Tensor | tuple[str, ...] = nonfinite
        self._names = names
        self._parts = (found, scale, norm, nonfinite)

    @property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, so that at least one optimizer did not step."""
        self._found = bool(self._found)
        return self._found

    @property
    def scale(self) -> float:
        """The loss scale that the step's gradients had."""
        self._scale = float(self._scale)
        return self._scale

    @property
    def grad_norm(self) -> float:
        """L2 norm of the true gradients before clipping, over all the optimizers stepped; not finite if skipped."""
        self._norm = float(self._norm() if callable(self._norm) else self._norm)
        return self._norm

    @property
    def nonfinite(self) -> tuple[str, ...]:
        """Paths of the parameters whose gradient was not finite; empty if the step was taken."""
        if isinstance(self._nonfinite, Tensor):
            flags = self._nonfinite.tolist()
            self._nonfinite = tuple(n for n, bad in zip(self._names(), flags, strict=True) if bad) if any(flags) else ()
        return self._nonfinite

    def after_replay(self, index: int) -> StepReport:
        """A report of the same step, run again by a CUDA graph that wrote new values into its tensors."""
        parts = (part() if callable(part) else part for part in self._parts)
        found, scale, norm, nonfinite = (part.clone() for part in parts)  # type: ignore[union-attr]
        report = StepReport(index, found, scale, lambda: norm, nonfinite, self._names)
        report._parts = self._parts
        return report

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as the values it has; a host sync."""
        return StepReport, (self.index, self.skipped, self.scale, self.grad_norm, self.nonfinite, tuple)

    def __repr__(self) -> str:
        return (
            f"StepReport(index={self.index}, skipped={self.skipped}, scale={self.scale:g}, "
            f"grad_norm={self.grad_norm:.4g})"
        )
