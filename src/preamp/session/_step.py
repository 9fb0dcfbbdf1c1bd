"""One optimizer's step, taken or skipped, by as few waits for the device as the optimizer allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import SessionError
from ..optim import FusedOptimizer
from ..sharding import held_here
from ._gradients import GradientBook

SKIPS = ("auto", "host", "device")
"""Who decides about the skip of an optimizer that takes no flag."""


def step_unless(found: Tensor, optimizer: Optimizer, book: GradientBook, apart: bool, skip: str) -> bool | None:
    """Step unless `found`; returns whether it skipped, or None when only the device knows.

    Optimizers of `preamp.optim` take gradients as they rest, low and scaled, with a factor and the session's masters.
    torch's fused ones take true gradients and the flag. Any other is stepped when the host has read the flag, the one
    wait of such a step; or, with `skip="device"` and for capturable ones, stepped always and put back where `found`.
    """
    on_cpu, fused = found.device.type == "cpu", getattr(optimizer, "_step_supports_amp_scaling", False)
    on_device = not fused and (skip == "device" or (not on_cpu and not needs_host(optimizer, skip)))
    if on_device and not all(optimizer.state.get(p) for p in _stepping(optimizer)):
        on_device = False  # states made by this step could not be unmade: the host decides
    skipped = bool(found) if (on_cpu or not fused) and not on_device else None
    if skipped:
        return True
    if isinstance(optimizer, FusedOptimizer) and fused and not book.is_true(optimizer) and not apart:
        book.step_low(optimizer, None if on_cpu else found)
        return skipped
    book.make_true(optimizer)
    if on_device:
        _step_and_put_back(optimizer, found)
    elif fused:
        _step_under_flag(optimizer, None if on_cpu else found)
    else:
        optimizer.step()
    return skipped


def _step_under_flag(optimizer: Any, found: Tensor | None) -> None:
    """By torch's own protocol: attributes that a fused step reads."""
    optimizer.grad_scale, optimizer.found_inf = None, found
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def needs_host(optimizer: Optimizer, skip: str) -> bool:
    """Whether, on an accelerator, only the host can tell an optimizer not to step."""
    capturable = all(group.get("capturable", False) for group in optimizer.param_groups)
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not (fused or skip == "device" or (skip == "auto" and capturable))


def _stepping(optimizer: Optimizer) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if p.grad is not None)


@torch.no_grad()
def _step_and_put_back(optimizer: Optimizer, found: Tensor) -> None:
    """Step, then undo it on the device where `found`: costs a copy of parameters and states, and no wait."""
    before: list[tuple[Callable[[], Any], Any]] = []
    for parameter in _stepping(optimizer):
        before.append((lambda p=parameter: held_here(p.detach()), held_here(parameter.detach()).clone()))  # type: ignore[misc]
        state = optimizer.state[parameter]
        for name, value in state.items():
            kept = held_here(value).clone() if isinstance(value, Tensor) else value
            before.append((lambda s=state, n=name: _held(s[n]), kept))  # type: ignore[misc]
    optimizer.step()
    for look, kept in before:
        now = look()
        if isinstance(now, Tensor) and isinstance(kept, Tensor):
            now.copy_(torch.where(found.to(now.device) > 0, kept, now))
        elif now is not kept and now != kept:
            raise SessionError(
                f"{type(optimizer).__name__} counts on the host ({kept!r} became {now!r}), which a skip on the device "
                "cannot undo: leave out skip='device', or make the optimizer with capturable=True"
            )


def _held(value: Any) -> Any:
    return held_here(value) if isinstance(value, Tensor) else value
