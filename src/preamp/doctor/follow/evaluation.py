"""Evaluation under `no_grad`: the first ones of a run are shadowed, too, from the model's call to the next step."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..replay.tape import Tape
from ..shadow.absorbed import Changes
from ..shadow.execution import Shadowed
from .audit import emit_changes
from .run import Run

LOOKS = 3
"""Evaluations of a run that are looked at."""
CALLS = 16
"""Model calls of one that are."""


class Evaluation:
    """Shadows what models compute without gradients, and what is computed from it."""

    def __init__(self, run: Run, replay: bool) -> None:
        self._run, self._replay = run, replay
        self._looks = self._calls = 0
        self._shadowed: Shadowed | None = None
        self._changes = Changes()
        """What is changed in place, in all of its model calls: what adds up there may stop late."""
        self._tape = Tape(run.stream, run.tape.readings)
        self._turn = -1
        """The turn of the last one."""

    def model_called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is about to run without gradients; what is returned is handed to `model_returned`."""
        if self._shadowed is None:
            if self._looks >= LOOKS or self._run.turn == self._turn:
                return None
            self._looks, self._calls, self._turn = self._looks + 1, 0, self._run.turn
            self._shadowed = Shadowed(readings=self._tape.readings)
            self._changes = Changes()
            self._run.names.get(module)
            self._run.stream.add(self._shadowed, self._changes, inside=module)
        self._calls += 1
        if self._calls > CALLS:
            self._tape.close_window()
            self._run.stream.remove(self._shadowed)
            return None
        return self._tape.enter_model(module, args, kwargs)

    def model_returned(self, call: Any, out: Any) -> None:
        """It has returned `out`."""
        if out is not None:
            self._tape.leave_model(call, out, keep_on=True)

    def end(self) -> None:
        """A step of the training begins, or the script is over: report what there was."""
        shadowed, self._shadowed = self._shadowed, None
        if shadowed is None:
            return
        run, facts = self._run, [*shadowed.facts, *shadowed.read_out]
        self._tape.close_window()
        run.stream.remove(shadowed, self._changes)
        emit_changes(self._changes, run, run.step)
        trials = run.trials(self._tape) if facts and self._replay else None
        run.tell(facts, trials)
        run.recorder.write("evaluation", step=run.step, **shadowed.told())
        self._tape.clear()
