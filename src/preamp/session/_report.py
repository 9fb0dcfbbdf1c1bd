"""`StepReport`: what a step did, read from the device on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor


class StepReport:
    """What `Session.step` did. Its fields are read from the device at first access, which is a host sync.

    A report is a value of its own: later steps do not change it.

    >>> session.backward(loss)
    >>> if not session.step().skipped:
    ...     schedule.step()
    """

    _of_graph: StepReport | None = None
    """The one whose tensors a CUDA graph writes."""

    def __init__(
        self, index: int, found: Tensor | bool, scale: Tensor | float, norm: Callable[[], Tensor] | float,
        nonfinite: Tensor | tuple[str, ...], names: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        self.index = index
        """Which attempt at a step this was, counted from 0."""
        self._found, self._scale, self._norm, self._nonfinite, self._names = found, scale, norm, nonfinite, names

    @cached_property
    def skipped(self) -> bool:
        """Whether a gradient was not finite, so that at least one optimizer did not step."""
        return bool(self._found)

    @cached_property
    def scale(self) -> float:
        """The loss scale that the step's gradients had."""
        return float(self._scale)

    @cached_property
    def grad_norm(self) -> float:
        """L2 norm of the true gradients before clipping, over all the optimizers stepped; not finite if skipped."""
        return float(self._norm() if callable(self._norm) else self._norm)

    @cached_property
    def nonfinite(self) -> tuple[str, ...]:
        """Paths of the parameters whose gradient was not finite; empty if the step was taken."""
        if not isinstance(self._nonfinite, Tensor):
            return self._nonfinite
        flags = self._nonfinite.tolist()
        return tuple(n for n, bad in zip(self._names(), flags, strict=True) if bad) if any(flags) else ()

    def after_replay(self, index: int) -> StepReport:
        """A report of the same step, run again by a CUDA graph that wrote new values into its tensors."""
        of_graph = self._of_graph or self
        norm = of_graph._norm().clone()  # type: ignore[operator]
        parts = (of_graph._found, of_graph._scale, of_graph._nonfinite)
        found, scale, nonfinite = (part.clone() for part in parts)  # type: ignore[union-attr]
        report = StepReport(index, found, scale, lambda: norm, nonfinite, self._names)
        report._of_graph = of_graph
        return report

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as the values it has; a host sync."""
        return StepReport, (self.index, self.skipped, self.scale, self.grad_norm, self.nonfinite, tuple)

    def __repr__(self) -> str:
        read = f"skipped={self.skipped}, scale={self.scale:g}, grad_norm={self.grad_norm:.4g}"
        return f"StepReport(index={self.index}, {read})"
