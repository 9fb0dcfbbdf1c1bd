"""`preamp.GradScaler`: torch's, plus bounds, a skip flag that tells the truth, and a history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ScaleCollapse
from ._schedules import PATIENCE, check_bounds, check_count, check_factors, check_scale

HISTORY = 1000
"""How many updates `GradScaler.history` keeps."""


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """One `update()`: the scale the losses had, and whether a step under it was skipped."""

    scale: float
    skipped: bool


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with the same trajectory and state_dict, accepted wherever it is. It also

    * keeps the scale within `min_scale` and `max_scale` (None: the limits of float32). torch's scale can reach a
      subnormal or 0, where it applies steps with infinite gradients;
    * tells by `skipped` whether the last `step` was skipped, for fused optimizers too (reading it waits);
    * keeps the last updates in `history`;
    * raises `ScaleCollapse` after `patience` skipped updates in a row (None: never), naming the first parameter whose
      gradient is not finite.

    Arguments out of range are a `ScaleError`: `init_scale` and bounds in [2**-126, 2**127], `growth_factor` > 1,
    `backoff_factor` in (0, 1), `growth_interval` >= 1.
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
    ) -> None:
        check_factors(growth_factor, backoff_factor, growth_interval)
        start = check_scale(init_scale, "init_scale")
        self._floor, self._ceiling = check_bounds(start, min_scale, max_scale)
        self._patience = None if patience is None else check_count(patience, "patience", "it counts skipped updates")
        super().__init__(device, start, float(growth_factor), float(backoff_factor), growth_interval, enabled)
        self._last_found: tuple[Tensor, ...] = ()
        self._in_a_row: Tensor | None = None
        self._history: deque[tuple[Tensor, Tensor]] = deque(maxlen=HISTORY)
        self._seen: list[Optimizer] = []
        self._updates = 0

    @property
    def skipped(self) -> bool:
        """Whether the last `step()` was skipped because a gradient was not finite; waits for the device."""
        return any(bool(found.item()) for found in self._last_found)

    @property
    def history(self) -> Iterator[ScaleEvent]:
        """The last updates, oldest first; waits for the device."""
        return (ScaleEvent(float(scale), bool(found)) for scale, found in tuple(self._history))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's: unscale if need be, then `optimizer.step()` unless a gradient is not finite."""
        result = super().step(optimizer, *args, **kwargs)
        if self._enabled:
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            self._last_found = tuple(found.values())
            self._seen.append(optimizer)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, then keeps the scale within its bounds. `new_scale`: a number, or a 0-d float32 tensor."""
        if not self._enabled:
            return
        if isinstance(new_scale, (int, float)):
            new_scale = check_scale(new_scale, "new_scale")
        used, found = self._scale, self._found_in_any_optimizer()
        used = used.clone() if used is not None else None
        super().update(new_scale)
        scale: Tensor = self._scale  # type: ignore[assignment]
        if isinstance(new_scale, Tensor):
            scale.nan_to_num_(nan=self._floor)
        scale.clamp_(self._floor, self._ceiling)
        if used is not None and found is not None:
            self._history.append((used, found))
            self._watch_for_collapse(found, used)
        self._seen.clear()

    def _found_in_any_optimizer(self) -> Tensor | None:
        found = [
            flag.to(self._scale.device, non_blocking=True)  # type: ignore[union-attr]
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found:
            return None
        return (torch.stack([flag.reshape(()) for flag in found]).sum() > 0).float()

    def _watch_for_collapse(self, found: Tensor, used: Tensor) -> None:
        if self._patience is None:
            return
        self._updates += 1
        run = self._in_a_row if self._in_a_row is not None else torch.zeros_like(found)
        self._in_a_row = (run + 1) * found
        # On an accelerator the count is read once in `patience` updates, so that no step waits for it.
        due = found.device.type == "cpu" or self._updates % self._patience == 0
        if due and int(self._in_a_row) >= self._patience:
            skipped = int(self._in_a_row)
            self._in_a_row = None
            parameter = _first_nonfinite(self._seen)
            raise ScaleCollapse(
                f"{skipped} updates in a row were skipped because gradients were not finite, and the loss scale fell "
                f"to {float(used):g}; the first such gradient: {parameter or 'none now'}. No scale cures "
                "that: look for NaN in the data or the loss, compute in bfloat16, or keep the layer in float32 "
                "(preamp.float_function). patience=None lets training go on.",
                name="loss", scale=float(used), skipped=skipped, parameter=parameter,
            )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; a scale outside the bounds is a `ScaleError` and changes nothing."""
        if self._enabled and "scale" in state_dict:
            scale = check_scale(state_dict["scale"], "scale in the state_dict")
            check_bounds(scale, self._floor, self._ceiling, "scale in the state_dict")
        super().load_state_dict(state_dict)

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's, checked: above 1."""
        check_factors(new_factor, self.get_backoff_factor(), self.get_growth_interval())
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's, checked: in (0, 1)."""
        check_factors(self.get_growth_factor(), new_factor, self.get_growth_interval())
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's, checked: a whole number of at least 1."""
        check_factors(self.get_growth_factor(), self.get_backoff_factor(), new_interval)
        super().set_growth_interval(new_interval)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.update(_last_found=(), _in_a_row=None, _history=deque(maxlen=HISTORY), _seen=[])
        return state


def _first_nonfinite(optimizers: list[Optimizer]) -> str | None:
    """The first parameter with a gradient that is not finite, by its place in the optimizer's groups."""
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    names = group.get("param_names")
                    return names[p] if names else f"param_groups[{g}]['params'][{p}] of shape {tuple(parameter.shape)}"
    return None
