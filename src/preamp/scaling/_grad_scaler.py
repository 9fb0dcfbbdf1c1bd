"""`preamp.GradScaler`: torch's, plus bounds, a correct skip flag, and a history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import ScaleError
from ..frameworks import framework_hooks, unwrap_imitation
from ..kernels import chained, check_and_unscale_, read, reciprocal
from ..ledger import gradients_of, parameters_of, summed
from ._checks import LARGEST_SCALE, PATIENCE, SMALLEST_SCALE, check_bounds, check_count, check_factors, check_scale
from ._dynamic import DynamicScale, HysteresisScale
from ._skips import Run, Skips, first_nonfinite

HISTORY = 1000
"""How many updates `GradScaler.history` keeps."""


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One `update()`: the scale the losses had, and whether a step under it was skipped."""

    scale: float
    skipped: bool


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with the same trajectory and state_dict, accepted wherever it is. It also

    * keeps the scale within bounds. torch's can reach a subnormal or 0, where it applies steps with infinite gradients;
    * shows by `skipped` whether the last `step` was skipped, for fused optimizers too (reading it is a host sync);
    * keeps the last updates in `history`;
    * can take another schedule;
    * raises `ScaleCollapse` when skips never end, naming the first parameter whose gradient is not finite.

    `init_scale`, the factors, `growth_interval`, the bounds and `patience` are those of `DynamicScale`.

    Args:
        device: The type of the device.
        enabled: False for a scaler that does nothing.
        schedule: "backoff", "hysteresis", or a loss scale of yours (`HysteresisScale(...)`), which then holds the start
            and the factors; its state is in the state_dict.

    >>> scaler = preamp.GradScaler("cuda", min_scale=1.0)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        patience: int | None = PATIENCE,
        schedule: str | DynamicScale = "backoff",
    ) -> None:
        start, self._floor, self._ceiling = init_scale, SMALLEST_SCALE, LARGEST_SCALE
        if enabled:  # torch, too, takes anything where it does nothing
            check_factors(growth_factor, backoff_factor, growth_interval)
            start = check_scale(init_scale, "init_scale")
            self._floor, self._ceiling = check_bounds(start, min_scale, max_scale)
            growth_factor, backoff_factor = float(growth_factor), float(backoff_factor)
            growth_interval = int(growth_interval)
        self._patience = None if patience is None else check_count(patience, "patience", "it counts skipped updates")
        super().__init__(device, start, growth_factor, backoff_factor, growth_interval, enabled)
        self._schedule = self._scheduled(schedule, start, min_scale, max_scale) if enabled else None
        self._last_found: tuple[Tensor, ...] = ()
        self._history: deque[tuple[Tensor | float, Tensor]] = deque(maxlen=HISTORY)
        self._seen: list[Optimizer] = []
        self._updates, self._skips, self._run = 0, Skips(), Run(self._patience)

    def _scheduled(
        self, schedule: str | DynamicScale, start: float, min_scale: float | None, max_scale: float | None
    ) -> DynamicScale | None:
        """The schedule in torch's place; None for torch's own."""
        if schedule in ("backoff", "dynamic"):
            return None
        bounds: dict[str, Any] = {"min_scale": min_scale, "max_scale": max_scale, "patience": None}
        if schedule == "hysteresis":
            factors = (self._growth_factor, self._backoff_factor, self._growth_interval)
            return HysteresisScale(start, *factors, **bounds)
        if not isinstance(schedule, DynamicScale):
            raise ScaleError(f"schedule={schedule!r}: write 'backoff', 'hysteresis', or HysteresisScale(...)")
        self._init_scale = schedule.state_dict()["scale"]
        return schedule

    @property
    def skipped(self) -> bool:
        """Whether the last `step()` was skipped because a gradient was not finite; a host sync."""
        return any(bool(found.item()) for found in self._last_found)

    @property
    def history(self) -> Iterator[ScaleEvent]:
        """The last updates, oldest first; a host sync."""
        return (ScaleEvent(float(scale), bool(found)) for scale, found in tuple(self._history))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's: unscale if need be, then `optimizer.step()` unless a gradient is not finite."""
        if not self._enabled or "closure" in kwargs:  # which is an error
            stepped = super().step(optimizer, *args, **kwargs)
            torch.clear_autocast_cache()
            return stepped
        given, optimizer = optimizer, unwrap_imitation(optimizer)
        self._check_scale_growth_tracker("step")  # before anything is noted of this optimizer
        state = self._per_optimizer_states[id(optimizer)]
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if (
            fused
            and state["stage"] is OptState.UNSCALED
            and not state["found_inf_per_device"]
            and gradients_of(optimizer)
        ):
            raise AssertionError(
                "No inf checks were recorded for this optimizer: it had no gradients when it was checked."
            )
        try:
            with framework_hooks(given if given is not optimizer else None):
                if state["stage"] is OptState.READY and getattr(optimizer, "takes_masters", False):
                    stepped = self._step_ours(optimizer, state, *args, **kwargs)
                else:
                    stepped = super().step(optimizer, *args, **kwargs)
        except BaseException:  # else the next step would be divided by this scale as well
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
            raise
        torch.clear_autocast_cache()  # of a region that is open still: casts of weights as they were
        self._last_found = tuple(state["found_inf_per_device"].values())
        self._seen.append(optimizer)
        return stepped

    def _step_ours(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> float | None:
        """A step of preamp.optim. The lists of the step are read once: unscaled as well on a CPU, else in the step.

        float16 gradients stay scaled until the step, since unscaled they would underflow in float16.
        """
        scale: Any = self._scale
        collected = optimizer.collect_anew()
        lists = [gradients for _, gradients in collected]
        here = all(gradients[0].device == scale.device for gradients in lists)
        sharded = any(bucket.sharded for bucket, _ in collected)
        if not here or not lists or sharded or optimizer.is_hooked or hasattr(optimizer, "grad_scale"):
            return super().step(optimizer, *args, **kwargs)
        inverse = reciprocal(scale)
        factor: Tensor | None = inverse
        if scale.device.type == "cpu" and not any(gradients[0].dtype is torch.float16 for gradients in lists):
            found = torch.zeros_like(scale)
            for gradients in lists:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            factor = None
        else:
            found = read(chained(lists)).found
        state.update(found_inf_per_device={scale.device: found}, stage=OptState.STEPPED)
        if found.device.type == "cpu" and found.item() > 0:
            return None
        result: float | None = optimizer.step_with(*args, factor=factor, found=found, collected=collected, **kwargs)
        return result

    def unscale_(self, optimizer: Optimizer) -> None:
        """As torch's."""
        super().unscale_(unwrap_imitation(optimizer))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, also for complex gradients, and for shards, whose ranks agree on the flag."""
        gradients = [summed(parameter) for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if not allow_fp16 and any(gradient.dtype is torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        found = check_and_unscale_(gradients, inv_scale)
        return {found_inf.device: found.to(found_inf.device)} if gradients else {}

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update as torch does, and keep the scale within its bounds. `new_scale`: a number, or 0-d float32."""
        if not self._enabled:
            return
        if new_scale is not None and not isinstance(new_scale, Tensor):
            new_scale = check_scale(new_scale, "new_scale")
        found, used = self._found_in_any_optimizer(), None if self._scale is None else _kept(self._scale)
        scale: Tensor
        if self._schedule is not None:
            scale = self._update_by_schedule(self._schedule, new_scale, found)
        else:
            super().update(new_scale)
            scale = self._scale  # type: ignore[assignment]
        if isinstance(new_scale, Tensor):
            scale.nan_to_num_(nan=self._floor)
        if scale.device.type != "cpu" or not self._floor <= scale.item() <= self._ceiling:
            scale.clamp_(self._floor, self._ceiling)
        if used is not None and found is not None:
            self._history.append((used, found))
            self._count(found, used)
        self._seen.clear()

    def _update_by_schedule(self, schedule: DynamicScale, new_scale: Any, found: Tensor | None) -> Tensor:
        scale, _ = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            raise ScaleError(f"update({new_scale!r}) under {schedule!r}, which chooses the scale: make another scaler")
        if found is None:
            raise AssertionError("No inf checks were recorded prior to update: call step() or unscale_() first.")
        schedule.after_step(found.to(scale.device))
        scale.copy_(schedule.current(scale.device))
        self._per_optimizer_states.clear()
        return scale

    def _found_in_any_optimizer(self) -> Tensor | None:
        states = self._per_optimizer_states.values()
        found = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if not found:
            return None
        home = self._scale.device  # type: ignore[union-attr]  # optimizers of other devices may follow
        flags = [flag.to(home, non_blocking=True).reshape(()) for flag in found]
        return flags[0] if len(flags) == 1 else torch.stack(flags).amax()

    def _count(self, found: Tensor, used: Tensor | float) -> None:
        """Count a skip, and raise `ScaleCollapse` where they never end. `used`: the scale of this update."""
        host_skipped = bool(found.item()) if found.device.type == "cpu" else None
        self._skips.count(self._updates, found, host_skipped)
        self._updates += 1
        run = self._run.add(found, host_skipped, self._skips)
        seen = _named(self._seen)
        self._run.judge(run, "loss", lambda: float(used), lambda: first_nonfinite(seen), "preamp.float_function")

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state of another schedule under "schedule"."""
        state = super().state_dict()
        return {**state, "schedule": self._schedule.state_dict()} if self._enabled and self._schedule else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a scale outside the bounds is a `ScaleError` and changes nothing.

        A state of torch's scaler, or of another schedule, sets only the scale from which this one goes on.
        """
        if self._enabled and "scale" in state_dict:
            scale = check_scale(state_dict["scale"], "scale in the state_dict")
            check_bounds(scale, self._floor, self._ceiling, "scale in the state_dict")
            if self._schedule is not None:
                given = state_dict.get("schedule", {})
                fits = given.get("kind") == self._schedule.kind
                self._schedule.load_state_dict(given if fits else {**self._schedule.state_dict(), "scale": scale})
        super().load_state_dict(state_dict)

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's, checked: above 1."""
        check_factors(new_factor, 0.5, 1)
        super().set_growth_factor(float(new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's, checked: in (0, 1)."""
        check_factors(2.0, new_factor, 1)
        super().set_backoff_factor(float(new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's, checked: a whole number of at least 1."""
        check_factors(2.0, 0.5, new_interval)
        super().set_growth_interval(int(new_interval))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        fresh = {"_skips": Skips(), "_run": Run(self._patience)}
        state.update(_last_found=(), _history=deque(maxlen=HISTORY), _seen=[], **fresh)
        return state


def _kept(scale: Tensor) -> Tensor | float:
    """The value of a tensor that is about to be changed in place; on a device a copy, without a host sync."""
    return float(scale) if scale.device.type == "cpu" else scale.clone()


def _named(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """Parameters with their names, which optimizers made of `named_parameters()` know, else with their indices."""
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                at = f"param_groups[{g}]['params'][{p}] of shape {tuple(parameter.shape)}"
                yield group["param_names"][p] if group.get("param_names") else at, parameter
