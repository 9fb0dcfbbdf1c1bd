"""Schedules that learn from overflows alone: back off after a bad step, or after several.

All arithmetic stays on the gradients' device without a host sync, and state changes in place, so that a step can be
captured in a CUDA graph. `DynamicScale` is torch's schedule: after a step with a non-finite gradient the scale
is multiplied by `backoff_factor`; after `growth_interval` good steps in a row by `growth_factor` (Micikevicius et al.
2018, section 3.2, and `torch.amp.GradScaler`, which it follows bit for bit). It adds what that lacks: a floor and a
ceiling. Below the smallest normal float32, 1/scale overflows, every unscaled gradient becomes infinite after it was
found finite, and the step destroys the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..kernels import reciprocal
from ._checks import PATIENCE, check_bounds, check_count, check_factors, check_scale
from ._fixed import LossScale, at_least_float32


class DynamicScale(LossScale):
    """The largest scale that does not overflow, found by trying; defaults are those of `torch.amp.GradScaler`.

    Args:
        init_scale: Where it starts.
        growth_factor: By what it grows; above 1.
        backoff_factor: By what it falls after a bad step; in (0, 1).
        growth_interval: After how many good steps in a row it grows.
        min_scale: The least it can be; None for the limit of float32, 2^-126.
        max_scale: The most it can be; None for 2^127.
        patience: Skipped steps in a row after which the session raises `ScaleCollapse`; None for never.

    >>> session = preamp.prepare(model, optimizer, level="O1", scale=preamp.DynamicScale(growth_interval=500))
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
        self.growth_interval = int(growth_interval)
        self.min_scale, self.max_scale = min_scale, max_scale
        self.patience = None if patience is None else check_count(patience, "patience", "it counts skipped steps")
        # the scale, and counts of steps, where the gradients were last
        self._state = {"scale": torch.tensor(self._start, dtype=torch.float32, device="cpu")}
        self._count("good_steps")  # since the last change

    def _count(self, name: str) -> None:
        self._state[name] = torch.tensor(0, dtype=torch.int32, device="cpu")

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32."""
        return at_least_float32(loss) * self._on(loss.device)["scale"]

    def inverse(self, device: torch.device) -> Tensor:
        """1/scale, 0-d float32, rounded once from float64 as torch does."""
        return reciprocal(self._on(device)["scale"])

    def current(self, device: torch.device) -> Tensor:
        """The scale, 0-d float32; a copy."""
        return self._on(device)["scale"].clone()

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        if self._state["scale"].device != device:
            self._state = {name: value.to(device) for name, value in self._state.items()}
        return self._state

    def after_step(self, found_inf: Tensor) -> None:
        """Back off after a bad step, grow after enough good ones, stay within the bounds."""
        state = self._on(found_inf.device)
        scale, factors = state["scale"], (self.growth_factor, self.backoff_factor, self.growth_interval)
        torch._amp_update_scale_(scale, state["good_steps"], found_inf, *factors)
        if scale.device.type != "cpu" or not self._floor <= scale.item() <= self._ceiling:
            scale.clamp_(self._floor, self._ceiling)

    def state_dict(self) -> dict[str, Any]:
        """Every field as plain numbers; reads the scale from the device."""
        numbers = {name: value.item() for name, value in self._state.items()}
        return {"kind": self.kind, **numbers, **self._arguments()}

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take a state's fields, all checked before; its numbers go into the present tensors, which a CUDA graph may
        hold.
        """
        made = object.__new__(type(self))
        kind: Any = next(each for each in type(self).__mro__ if "_arguments" in vars(each))  # who takes these
        kind.__init__(made, state["scale"], **{name: state[name] for name in self._arguments()})
        for name in (counts := self._state.keys() - {"scale"}):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                raise StateError(f"the checkpoint's {self.kind} loss scale has {name}={value!r}: it counts steps")
        for name in counts:
            self._state[name].fill_(state[name])
        self._state["scale"].fill_(made._start)
        self.__dict__.update({**made.__dict__, "_state": self._state})

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments, except the initial scale."""
        names = ("growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale", "patience")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        arguments = {"init_scale": self._start, **self._arguments()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"


class HysteresisScale(DynamicScale):
    """As `DynamicScale`, but it backs off only at the `hysteresis`-th bad step; the ones before are skipped too.

    For gradients that overflow now and then in a single batch, which no smaller scale would help. As in Megatron-LM
    and DeepSpeed the bad steps need not follow each other: their count starts anew only when the scale grows. The other
    arguments are those of `DynamicScale`.

    Args:
        hysteresis: How many bad steps it takes; 1 is `DynamicScale`, bit for bit.

    >>> session = preamp.prepare(model, optimizer, level="O2", scale=preamp.HysteresisScale(hysteresis=3))
    """

    kind = "hysteresis"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        hysteresis: int = 2,
        min_scale: float | None = None,
        max_scale: float | None = None,
        patience: int | None = PATIENCE,
    ) -> None:
        super().__init__(
            init_scale, growth_factor, backoff_factor, growth_interval,
            min_scale=min_scale, max_scale=max_scale, patience=patience,
        )  # fmt: skip
        self.hysteresis = check_count(hysteresis, "hysteresis", "the scale backs off at that many bad steps")
        self._count("tolerated")  # bad steps since it last grew

    def after_step(self, found_inf: Tensor) -> None:
        """Back off after the bad step that is one too many, grow after enough good ones, stay within the bounds."""
        state = self._on(found_inf.device)
        scale, good_steps, tolerated = state["scale"], state["good_steps"], state["tolerated"]
        bad = found_inf > 0
        seen = (tolerated + bad).clamp_(max=self.hysteresis)
        good = (good_steps + 1) * ~bad
        grows = good == self.growth_interval
        exact = scale if scale.device.type == "mps" else scale.double()  # rounded once, as torch does
        grown = (exact * self.growth_factor).float()
        backed_off = (exact * self.backoff_factor).float()
        after_bad = torch.where(seen >= self.hysteresis, backed_off, scale)
        after_good = torch.where(grows & grown.isfinite(), grown, scale)
        scale.copy_(torch.where(bad, after_bad, after_good).clamp_(self._floor, self._ceiling))
        good_steps.copy_(good * ~grows)
        tolerated.copy_(seen * ~grows)

    def _arguments(self) -> dict[str, Any]:
        return {"hysteresis": self.hysteresis, **super()._arguments()}
