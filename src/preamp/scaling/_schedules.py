"""Loss scales: none, static, dynamic. Each scales a loss, and learns from a step whether its gradients were finite.

All arithmetic stays on the gradients' device; nothing here waits for it. The dynamic schedule is torch's: after a step
with a non-finite gradient the scale is multiplied by `backoff_factor`; after `growth_interval` good steps in a row by
`growth_factor` (Micikevicius et al. 2018, section 3.2, and `torch.amp.GradScaler`, which it follows bit for bit). It
adds what that lacks: a floor and a ceiling. Below the smallest normal float32, 1/scale overflows, every unscaled
gradient becomes infinite after it was found finite, and the step destroys the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ScaleError, StateError
from ..formats import FP32

SMALLEST_SCALE = FP32.smallest_normal
"""No scale is ever below this: its reciprocal is still finite in float32."""

LARGEST_SCALE = 2.0**127
"""No scale is ever above this: the largest power of two in float32."""

PATIENCE = 100
"""Skipped steps in a row after which a schedule gives up, unless told otherwise."""


def check_scale(scale: Any, name: str = "scale") -> float:
    """`scale` as a float if it is a usable loss scale, else `ScaleError`."""
    number = _number(scale, name)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ScaleError(
            f"{name}={scale!r}: a loss scale lies between 2**-126 and 2**127, so that the scale and its reciprocal are "
            "normal float32 numbers; beyond, unscaled gradients become infinite or zero without anybody noticing"
        )
    return number


def check_factors(growth_factor: Any, backoff_factor: Any, growth_interval: Any) -> None:
    """Raises `ScaleError` unless growth > 1, 0 < backoff < 1 and the interval is a whole number of at least 1."""
    if _number(growth_factor, "growth_factor") <= 1:
        raise ScaleError(f"growth_factor={growth_factor!r} must be above 1, or the scale never recovers; torch uses 2")
    if not 0 < _number(backoff_factor, "backoff_factor") < 1:
        raise ScaleError(
            f"backoff_factor={backoff_factor!r} must lie between 0 and 1, or an overflow never ends; torch uses 0.5"
        )
    check_count(growth_interval, "growth_interval", "growth_interval counts good steps before the scale grows")


def check_count(value: Any, name: str, why: str) -> int:
    """`value` as a whole number of at least 1, else `ScaleError`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScaleError(f"{name}={value!r} must be a whole number of at least 1: {why}")
    return value


def check_bounds(
    init_scale: float, min_scale: float | None, max_scale: float | None, init_name: str = "init_scale"
) -> tuple[float, float]:
    """The floor and the ceiling in force (None: the limits of float32), checked against each other and the start."""
    floor = SMALLEST_SCALE if min_scale is None else check_scale(min_scale, "min_scale")
    ceiling = LARGEST_SCALE if max_scale is None else check_scale(max_scale, "max_scale")
    if not floor <= init_scale <= ceiling:
        raise ScaleError(f"{init_name}={init_scale!r} lies outside [min_scale, max_scale] = [{floor!r}, {ceiling!r}]")
    return floor, ceiling


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ScaleError(f"{name}={value!r} must be a finite number")
    return float(value)


class LossScale(ABC):
    """What a session asks of a loss scale."""

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

    @abstractmethod
    def after_step(self, found_inf: Tensor) -> None:
        """Learn from a step: `found_inf` is 0-d float32, above 0 where a gradient was not finite."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; `StateError` for another kind of scale or missing fields."""
        expected = self.state_dict()
        if state.get("kind") != self.kind:
            raise StateError(f"the checkpoint's loss scale is {state.get('kind')!r}, this session's is {self.kind!r}")
        if set(state) != set(expected):
            difference = sorted(set(state) ^ set(expected))
            raise StateError(f"the checkpoint's {self.kind} loss scale differs in fields: {', '.join(difference)}")
        self._restore(state)

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None: ...


class NoScale(LossScale):
    """A scale of 1 that never changes: for float32 and bfloat16."""

    kind = "none"

    def scale(self, loss: Tensor) -> Tensor:
        """The loss itself."""
        return loss

    def inverse(self, device: torch.device) -> None:
        """None: there is nothing to undo."""

    def current(self, device: torch.device) -> Tensor:
        """1."""
        return torch.ones((), dtype=torch.float32, device=device)

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
    """A scale that never changes: `StaticScale(512.)`. Powers of two scale without rounding.

    Unlike Apex, a step whose gradients are not finite is skipped under a static scale too.
    """

    kind = "static"

    def __init__(self, value: float, *, patience: int | None = PATIENCE) -> None:
        self._value = check_scale(value)
        self.patience = None if patience is None else check_count(patience, "patience", "it counts skipped steps")

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32."""
        return _at_least_float32(loss) * self._value

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
        self._value = check_scale(state["scale"])
        self.patience = state["patience"]

    def __repr__(self) -> str:
        return f"StaticScale({self._value!r})"


class DynamicScale(LossScale):
    """The largest scale that does not overflow, found by trying; defaults are those of `torch.amp.GradScaler`.

    `init_scale`: where it starts. `growth_factor` (> 1), `backoff_factor` (in (0, 1)), `growth_interval` (steps, >= 1):
    the schedule. `min_scale`, `max_scale`: bounds (None: the limits of float32). `patience`: skipped steps in a row
    after which the session raises `ScaleCollapse` (None: never). Raises `ScaleError` for anything out of range.
    """

    kind = "dynamic"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        patience: int | None = PATIENCE,
    ) -> None:
        check_factors(growth_factor, backoff_factor, growth_interval)
        self._start = check_scale(init_scale, "init_scale")
        self._floor, self._ceiling = check_bounds(self._start, min_scale, max_scale)
        self.growth_factor = float(growth_factor)
        self.backoff_factor = float(backoff_factor)
        self.growth_interval = growth_interval
        self.min_scale, self.max_scale = min_scale, max_scale
        self.patience = None if patience is None else check_count(patience, "patience", "it counts skipped steps")
        self._scale: Tensor | None = None
        self._good_steps: Tensor | None = None
        self._start_good_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32."""
        return _at_least_float32(loss) * self._tensors(loss.device)[0]

    def inverse(self, device: torch.device) -> Tensor:
        """1/scale, 0-d float32, rounded once from float64 as torch does."""
        return self._tensors(device)[0].double().reciprocal().float()

    def current(self, device: torch.device) -> Tensor:
        """The scale, 0-d float32; a copy."""
        return self._tensors(device)[0].clone()

    def after_step(self, found_inf: Tensor) -> None:
        """Back off after a bad step, grow after enough good ones, stay within the bounds."""
        scale, good_steps = self._tensors(found_inf.device)
        torch._amp_update_scale_(
            scale, good_steps, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        scale.clamp_(self._floor, self._ceiling)

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scale (float32) and good steps since the last change (int32), where the gradients are."""
        if self._scale is None or self._good_steps is None:
            self._scale = torch.full((), self._start, dtype=torch.float32, device=device)
            self._good_steps = torch.full((), self._start_good_steps, dtype=torch.int32, device=device)
        elif self._scale.device != device:
            self._scale, self._good_steps = self._scale.to(device), self._good_steps.to(device)
        return self._scale, self._good_steps

    def state_dict(self) -> dict[str, Any]:
        """Every field as plain numbers; reads the scale from the device."""
        started = self._scale is not None and self._good_steps is not None
        return {
            "kind": self.kind,
            "scale": float(self._scale) if started else self._start,  # type: ignore[arg-type]
            "good_steps": int(self._good_steps) if started else self._start_good_steps,  # type: ignore[arg-type]
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "patience": self.patience,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        restored = DynamicScale(
            state["scale"],
            state["growth_factor"],
            state["backoff_factor"],
            state["growth_interval"],
            min_scale=state["min_scale"],
            max_scale=state["max_scale"],
            patience=state["patience"],
        )
        good_steps = state["good_steps"]
        if isinstance(good_steps, bool) or not isinstance(good_steps, int) or good_steps < 0:
            raise StateError(f"the checkpoint's dynamic loss scale has good_steps={good_steps!r}: it counts steps")
        restored._start_good_steps = good_steps
        self.__dict__.update(restored.__dict__)

    def __repr__(self) -> str:
        return (
            f"DynamicScale(init_scale={self._start!r}, growth_factor={self.growth_factor!r}, "
            f"backoff_factor={self.backoff_factor!r}, growth_interval={self.growth_interval!r}, "
            f"min_scale={self.min_scale!r}, max_scale={self.max_scale!r}, patience={self.patience!r})"
        )


def loss_scale(description: float | str | LossScale) -> LossScale:
    """The loss scale that a policy's `scale` stands for: "dynamic", 1 (none), another number, or one of yours."""
    if isinstance(description, LossScale):
        return description
    if description == "dynamic":
        return DynamicScale()
    if isinstance(description, str):
        raise ScaleError(f"scale={description!r}: write 'dynamic', a number, or a LossScale")
    return NoScale() if description == 1 else StaticScale(description)


def _at_least_float32(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
