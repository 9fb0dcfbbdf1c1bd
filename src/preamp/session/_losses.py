"""The named losses of a session: their scales, the pending updates of these, and the skips in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import SessionError, StateError
from ..kernels import Reading, multiply_
from ..ledger import Gradients, gradients_of, is_marked
from ..scaling import LossScale, NoScale, Run, Skips


class Losses(dict[str, LossScale]):
    """Scales by name, in the order they were declared."""

    def __init__(self, scales: Mapping[str, LossScale]) -> None:
        super().__init__(scales)
        self._runs = {name: Run(scale.patience) for name, scale in scales.items()}
        self.skips = Skips()
        """Of the session's steps."""
        self.separate_scales = len(scales) > 1 and any(scale.kind != "none" for scale in scales.values())
        """Whether losses have scales of their own, so that their gradients must be unscaled before they are added."""
        self.shared = NoScale() if self.separate_scales else next(iter(scales.values()))
        """The scale that gradients have between backward and step."""
        self.scaled = any(scale.kind != "none" for scale in scales.values())
        """Whether any loss is scaled."""

    def named(self, name: str | None) -> str:
        """`name` if it is declared; the only name for None."""
        if name is None and len(self) == 1:
            return next(iter(self))
        if name is None:
            raise SessionError(f"this session has several losses; say which: name={' or '.join(map(repr, self))}")
        if name not in self:
            raise SessionError(
                f"no loss is called {name!r}; declared: {', '.join(self)}. "
                f"Declare it: prepare(..., losses=(..., {name!r}))"
            )
        return name

    def after_step(
        self, name: str, reading: Reading, host_skipped: bool | None, offender: Callable[[], str | None]
    ) -> None:
        """Update a scale after a step, and raise `ScaleCollapse` after too many skips in a row.

        `host_skipped`: whether the step was skipped, if the host knows; None: only the device does.
        """
        self[name].after_step(reading.found)
        self._judge(name, self._runs[name].add(reading.found, host_skipped, self.skips), reading.found.device, offender)

    def replayed(self, steps: int, offender: Callable[[], str | None]) -> None:
        """Read the skips in a row, now and then, of steps that a CUDA graph takes and the host does not see."""
        for name, run in self._runs.items():
            self._judge(name, run.replayed(steps, self.skips), run.device, offender)

    def _judge(self, name: str, run: int | None, device: torch.device, offender: Callable[[], str | None]) -> None:
        scale = self[name]
        stands = None if scale.kind == "none" else lambda: float(scale.current(device))
        self._runs[name].judge(run, name, stands, offender)

    def state_dict(self) -> dict[str, Any]:
        """The state of every scale, by name, with its number of skips in a row."""
        return {name: {**scale.state_dict(), "skipped_in_a_row": int(self._runs[name])} for name, scale in self.items()}

    def check(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """`StateError` if `state` is not of these losses and of these kinds of scale."""
        if list(state) != list(self):
            raise StateError(f"the state has the losses {', '.join(state)}; this session has {', '.join(self)}")
        for name, scale in self.items():
            if state[name].get("kind") != scale.kind:
                raise StateError(
                    f"the state's scale of loss {name!r} is {state[name].get('kind')!r}, "
                    f"this session's is {scale.kind!r}"
                )

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `state_dict` gave, and `check` has seen."""
        for name, scale in self.items():
            fields = dict(state[name])
            run = int(fields.pop("skipped_in_a_row"))
            scale.load_state_dict(fields)
            self._runs[name] = Run(scale.patience, run)


class PendingScales:
    """The pending updates of scales: which losses ran, and the readings of their gradients.

    A scale is updated once a round: after `step()` of all optimizers, or, when they are stepped one by one, at the next
    backward pass of its loss.
    """

    def __init__(self, losses: Losses, gradients: Gradients, optimizers: Iterable[Optimizer]) -> None:
        self._losses, self._gradients, self._optimizers = losses, gradients, list(optimizers)
        self._ran: set[str] = set()
        self._stepped: set[Optimizer] = set()
        self.due: dict[str, tuple[Reading, bool | None]] = {}
        """The losses whose scales are not yet updated, each with a reading and whether the host knows of a skip."""
        self._records: dict[Optimizer, dict[str, Reading]] = {}

    @property
    def names(self) -> list[str]:
        """The losses whose gradients a step would apply; empty when no backward came before."""
        return sorted(self._ran or self.due)

    @property
    def running(self) -> bool:
        """Whether a backward pass has run that no step of all optimizers followed."""
        return bool(self._ran)

    def ran(self, name: str) -> bool:
        """Record that a backward pass of a loss runs: hooks may step while it does. Returns whether it is the first."""
        first = name not in self._ran
        self._ran.add(name)
        return first

    def forget(self, *names: str) -> None:
        """Undo `ran`: the backward pass failed, or its gradients were cleared."""
        self._ran.difference_update(names)

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped since the last backward pass, while others have not."""
        return optimizer in self._stepped

    def all_ran(self) -> list[str]:
        """Record a backward pass of every loss; their names."""
        self._ran.update(self._losses)
        return self.names

    def record(self, name: str, readings: dict[Optimizer, Reading]) -> None:
        """Record the readings of each optimizer, for a loss with a scale of its own."""
        for optimizer, reading in readings.items():
            record = self._records.setdefault(optimizer, {})
            record[name] = record[name].merged(reading) if name in record else reading

    def void(self, optimizer: Optimizer) -> None:
        """Drop the readings of an optimizer whose gradients were cleared."""
        self._records.pop(optimizer, None)

    def void_zeroed(self) -> None:
        """`void` for every optimizer whose gradients were set to None without the session."""
        for optimizer in self._optimizers:
            if not gradients_of(optimizer):
                self.void(optimizer)

    def stepped(self, chosen: Sequence[Optimizer], reading: Reading, host_skipped: bool | None) -> None:
        """Record a step, taken or skipped. `reading`: of the gradients. `host_skipped`: as in `after_step`."""
        self._stepped.update(chosen)
        if not self._losses.separate_scales:
            for name in self._ran:
                self._add_due(name, reading, host_skipped)
        for optimizer in chosen:
            for name, own in self._records.pop(optimizer, {}).items():
                self._add_due(name, own, bool(own.found) if own.found.device.type == "cpu" else None)
        if len(chosen) == len(self._optimizers):
            self._ran.clear()

    def _add_due(self, name: str, reading: Reading, host_skipped: bool | None) -> None:
        if name in self.due:
            earlier, skipped = self.due[name]
            reading = earlier.merged(reading)
            host_skipped = None if host_skipped is None or skipped is None else host_skipped or skipped
        self.due[name] = (reading, host_skipped)

    def settle(self, name: str | None, offender: Callable[[], str | None]) -> None:
        """Update the scale of a loss (None: every scale). May raise `ScaleCollapse`, naming `offender()`."""
        stepped, self._stepped = self._stepped, set()
        for each in [due for due in self.due if name in (None, due)]:
            reading, host_skipped = self.due.pop(each)
            self._ran.discard(each)
            outstanding: list[Optimizer] = []
            if not self._losses.separate_scales and not stepped.issuperset(self._optimizers):
                outstanding = [o for o in self._optimizers if o not in stepped and o not in self._gradients.records]
            device = reading.found.device
            before = self._losses[each].current(device) if outstanding else None
            try:
                self._losses.after_step(each, reading, host_skipped, offender)
            finally:
                if before is not None:  # they go on accumulating: bring their gradients to the new scale
                    self.rescale(self._losses[each].current(device) / before, outstanding)

    def rescale(self, ratio: Tensor, optimizers: Iterable[Optimizer]) -> None:
        """Multiply gradients to which more may be added: those that no step has used, once each."""
        every = {id(gradient): gradient for optimizer in optimizers for gradient in gradients_of(optimizer)}
        multiply_([each for each in every.values() if not is_marked(each, "_preamp_stepped")], ratio)

    def clear(self) -> None:
        """Drop all pending updates."""
        for pending in (self._ran, self._stepped, self.due, self._records):
            pending.clear()


def named_values(value: Any, what: str) -> dict[str, Any]:
    """One thing, a sequence or a mapping of things, by name: one thing has the name "", a sequence "0", "1", ..."""
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise SessionError(f"prepare() got an empty list of {what}s")
        return {str(index): item for index, item in enumerate(value)} if len(value) > 1 else {"": value[0]}
    return {"": value}
