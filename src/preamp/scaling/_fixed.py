"""The interface of loss scales, and the two that never change: none, and static."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ._checks import PATIENCE, check_count, check_scale


class LossScale(ABC):
    """The interface of a loss scale."""

    kind: str
    patience: int | None = None
    """Skipped steps in a row after which training cannot go on; None: never."""

    @abstractmethod
    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32 if it was 16-bit (65536 does not fit float16)."""

    @abstractmethod
    def inverse(self, device: torch.device) -> Tensor | None:
        """1/scale, 0-d float32 on `device`; None when the scale is 1, so that there is nothing to undo."""

    @abstractmethod
    def current(self, device: torch.device) -> Tensor:
        """The scale, 0-d float32 on `device`; a copy."""

    def seed(self, loss: Tensor) -> Tensor | None:
        """The gradient to start `loss.backward` with, so that the result is that of `scale(loss)`.

        In the loss's dtype and shape; None if only `scale(loss)` works (for 16-bit losses, and for subclasses), or if
        that is the loss itself.
        """
        if self.kind == "none" or type(loss) is not Tensor or loss.dtype not in (torch.float32, torch.float64):
            return None
        seed = self.current(loss.device)
        return seed if seed.dtype is loss.dtype and not loss.dim() else seed.to(loss.dtype).view(loss.shape)

    @abstractmethod
    def after_step(self, found_inf: Tensor) -> None:
        """Learn from a step, without a host sync. `found_inf`: 0-d float32, above 0 if a gradient was not finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain numbers and lists; a host sync."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; `StateError` for another kind of scale or missing fields."""
        expected = self.state_dict()
        if state.get("kind") != self.kind:
            raise StateError(f"the checkpoint's loss scale is {state.get('kind')!r}, this session's is {self.kind!r}")
        if set(state) != set(expected):
            difference = sorted(map(str, set(state) ^ set(expected)))
            raise StateError(f"the checkpoint's {self.kind} loss scale differs in fields: {', '.join(difference)}")
        self._restore(state)

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None: ...


class NoScale(LossScale):
    """A scale of 1 that never changes: for float32 and bfloat16."""

    kind = "none"
    patience = PATIENCE
    _one = torch.ones((), dtype=torch.float32, device="cpu")

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def inverse(self, device: torch.device) -> None:
        """None: there is nothing to undo."""

    def current(self, device: torch.device) -> Tensor:
        """1, made once on a device."""
        self._one = self._one if self._one.device == device else torch.ones((), dtype=torch.float32, device=device)
        return self._one

    def after_step(self, found_inf: Tensor) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Only the kind."""
        return {"kind": self.kind}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def __repr__(self) -> str:
        return "NoScale()"


class StaticScale(LossScale):
    """A scale that never changes. Powers of two scale without rounding.

    Unlike Apex, a step whose gradients are not finite is skipped under a static scale too.

    Args:
        value: The scale, within [2^-126, 2^127].
        patience: Skipped steps in a row after which the session raises `ScaleCollapse`; None for never.

    >>> session = preamp.prepare(model, optimizer, level="O2", scale=preamp.StaticScale(512.0))
    """

    kind = "static"

    def __init__(self, value: float, *, patience: int | None = PATIENCE) -> None:
        self._value = check_scale(value)
        self.patience = None if patience is None else check_count(patience, "patience", "it counts skipped steps")

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32."""
        return at_least_float32(loss) * self._value

    def inverse(self, device: torch.device) -> Tensor:
        """1/scale, 0-d float32."""
        return torch.full((), 1.0 / self._value, dtype=torch.float32, device=device)

    def current(self, device: torch.device) -> Tensor:
        """The scale, 0-d float32."""
        return torch.full((), self._value, dtype=torch.float32, device=device)

    def after_step(self, found_inf: Tensor) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """Kind, value and patience."""
        return {"kind": self.kind, "scale": self._value, "patience": self.patience}

    def _restore(self, state: Mapping[str, Any]) -> None:
        restored = StaticScale(state["scale"], patience=state["patience"])  # every value checked before one is taken
        self._value, self.patience = restored._value, restored.patience

    def __repr__(self) -> str:
        return f"StaticScale({self._value!r})"


def at_least_float32(loss: Tensor) -> Tensor:
    """`loss` itself, or in float32 if it is 16-bit."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
