"""Skipped steps: counted, told by the logger "preamp", and an error where they never end.

They are counted on the device where the host does not know of them, and told where it learns of them anyway, so that no
step waits for the device because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import ScaleCollapse

LOG = logging.getLogger("preamp")
LOG.addHandler(logging.NullHandler())  # an application that sets up no logging sees nothing

MANY = 10
"""Skipped steps in a row that are a warning: from 2**16 a healthy start takes fewer."""


def first_nonfinite(named: Iterable[tuple[str, Parameter]]) -> str | None:
    """The name of the first parameter whose gradient is not finite; a host sync."""
    for name, parameter in named:
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None


class Count:
    """A number of steps: counted on the host if it knows of them, else on the device."""

    def __init__(self, start: int = 0) -> None:
        self._host = start
        self._device: Tensor | None = None

    def __int__(self) -> int:
        """The number; a host sync if it is on the device."""
        return self._host + (0 if self._device is None else int(self._device))


class Skips(Count):
    """The number of skipped steps."""

    _told = 0

    def count(self, step: int, found: Tensor, host_skipped: bool | None) -> None:
        """Count an attempted step. `found`: 0-d, 1 if skipped. `host_skipped`: None if only the device knows."""
        if host_skipped is not None:
            self._host += host_skipped
            if host_skipped:
                LOG.info("step %d was skipped: a gradient is not finite", step)
        elif self._device is None or self._device.device != found.device:
            self._host, self._device = int(self), found.clone()
        else:
            self._device.add_(found)  # in place, for a captured step to count too

    def read_with(self, run: Tensor, steps: int) -> int:
        """A count of the device, which the host waits for; what was skipped in these last steps comes with it."""
        if self._device is None or self._device.device != run.device:
            return int(run)
        value, total = map(int, torch.stack((run, self._device)).tolist())
        if total > self._told:
            LOG.info("%d of the last %d steps were skipped: a gradient was not finite", total - self._told, steps)
        self._told = total
        return value


class Run(Count):
    """The number of skipped steps in a row, under one scale.

    `patience`: how many of them end training; None: none do.
    """

    def __init__(self, patience: int | None, start: int = 0) -> None:
        super().__init__(start)
        self._patience, self._unread, self._next = patience, 0, MANY

    @property
    def device(self) -> torch.device:
        """The device of the number."""
        return torch.device("cpu") if self._device is None else self._device.device

    def add(self, found: Tensor, host_skipped: bool | None, skips: Skips) -> int | None:
        """Its length after a step; None if only the device knows it and a read is not yet due."""
        if host_skipped is not None:
            self._host, self._device = int(self) + 1 if host_skipped else 0, None
            return self._host
        if self._device is None or self._device.device != found.device:
            self._host, self._device = 0, torch.full_like(found, float(int(self)))
        torch.addcmul(found, self._device, found, out=self._device)  # (run + 1) * found, in place: a graph counts too
        return self.replayed(1, skips)

    def replayed(self, steps: int, skips: Skips) -> int | None:
        """Its length after steps that only the device saw, once in `patience` of them; else None."""
        found = self._device
        if found is None or (found.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        self._unread += steps
        if self._patience is None or (found.device.type != "cpu" and self._unread < self._patience):
            return None
        unread, self._unread = self._unread, 0
        return skips.read_with(found, unread)

    def judge(
        self, run: int | None, name: str, scale: Callable[[], float] | None, offender: Callable[[], str | None],
        advice: str = "prepare(..., modules={'its.path': 'full'})",
    ) -> None:  # fmt: skip
        """Warn of a long row, and again each time that it has doubled; raise `ScaleCollapse` at the end of patience.

        `run`: its length, where the host knows it. `scale`: reads the scale of the loss `name`; None: it has none.
        `offender`: finds the first bad parameter. `advice`: how to keep a layer in float32.
        """
        if run is None:
            return
        if run < MANY:
            self._next = MANY
        is_long, is_over = run >= self._next, self._patience is not None and run >= self._patience
        if not (is_long or is_over):
            return
        stands = 1.0 if scale is None else scale()
        if is_long:
            self._next = 2 * run
            end = f"{self._patience} end it by ScaleCollapse" if self._patience else "training goes on: patience=None"
            of_scale = "" if scale is None else f", and the scale of loss {name!r} stands at {stands:g}"
            LOG.warning("%d steps in a row were skipped%s: %s", run, of_scale, end)
        if not is_over:
            return
        self._host = 0
        if self._device is not None:
            self._device.zero_()
        parameter = offender()
        of_scale = "" if scale is None else f"loss scale {name!r} stands at {stands:g} after "
        cure = "Look" if scale is None else "No scale cures that: compute in bfloat16 (level='O4'), look"
        error = ScaleCollapse(
            f"{of_scale}{run} skipped steps in a row; first parameter, in the model's order, whose gradient is not "
            f"finite: {parameter or 'none now'}, which need not be where it began. `preamp doctor SCRIPT.py` names the "
            f"line. {cure} for inf or nan in the data or in the loss, or keep the layer of that line in float32: "
            f"{advice}."
            + ("" if scale is None else " A scale with patience=None goes on for ever."),
            name=name, scale=stands, skipped=run, parameter=parameter,
        )  # fmt: skip
        LOG.warning("%s", error)
        raise error
