"""`StepReport`: what a step did, read when somebody asks."""

from __future__ import annotations

from torch import Tensor


class StepReport:
    """What `Session.step` did. Its fields are read from the device when first asked for, which is what waits for it.

    A report is a value of its own: later steps do not change it.
    """

    __slots__ = ("_found", "_norm", "_scale", "index")

    def __init__(self, index: int, found: Tensor, scale: Tensor, norm: Tensor) -> None:
        self.index = index
        """Which attempt at a step this was, counted from 0."""
        self._found: Tensor | bool = found
        self._scale: Tensor | float = scale
        self._norm: Tensor | float = norm

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
        self._norm = float(self._norm)
        return self._norm

    def __repr__(self) -> str:
        return (
            f"StepReport(index={self.index}, skipped={self.skipped}, scale={self.scale:g}, "
            f"grad_norm={self.grad_norm:.4g})"
        )
