"""What the followers of a run share: its models and optimizers, the tape, the clock; where events and records go."""

from __future__ import annotations

import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...report import Finding
from ..findings import one_of_each
from ..findings.check import Check, Listeners
from ..findings.events import Deviated, Raised
from ..hooks import Clock, Patches
from ..names import Names
from ..operators import Stream
from ..places import Places, raised_at, without_ours
from ..records import NOWHERE, Line, Recorder, shown_path
from ..replay.tape import Tape
from ..replay.trials import Trials, untried
from ..shadow.execution import Shadowed
from ..shadow.facts import Absorbed, Fact
from ..shadow.source import Readings


class Run:
    """One process under observation; `base`: the folder to which paths in findings are relative."""

    def __init__(self, recorder: Recorder, base: Path, names: Names | None = None) -> None:
        self.recorder, self.names = recorder, names or Names()
        self.patches, self.clock = Patches(self.is_followed), Clock(self._failed)
        self.stream = Stream(lambda: Places(self.names.known, self.names.owners), self.clock, self.is_followed)
        self.tape = Tape(self.stream, Readings(), self.raised)
        self.emit = Listeners(one_of_each(Check), self.report)
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, Line] = weakref.WeakKeyDictionary()
        """Where each was made, if that was seen. The script decides how long they and the models live."""
        self.attempts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Attempts to step, taken or skipped, of each optimizer; of this run itself where there is none."""
        self.step = 0
        """Attempts so far, of the optimizer that made most."""
        self.losses: list[Tensor] = []
        """What went back in this step."""
        self.shadowed: Shadowed | None = None
        """Shadows of this step, if it is looked at."""
        self.counters: dict[Line, Absorbed] = {}
        """What counts in 16 bits, by line, as it was seen last."""
        self.backward_at = self.stepped_at = NOWHERE
        self.in_model = self.in_backward = False
        self.bad: str | None = None
        """What was not finite in this step, "loss" or "gradients"."""
        self.origins: set[Line] = set()
        """Where the origins are of what was not finite, as far as they were told."""
        self.is_given_up = False
        """Whether an error of the doctor has ended the observation."""
        self.on_failure: list[Callable[[], None]] = []
        self._base = base
        self._thread: threading.Thread | None = None
        self._is_alone = True
        self._reported: set[Any] = set()

    @property
    def is_own(self) -> bool:
        """Whether this is the process that is followed, and not one that it forked."""
        return self.recorder.is_own

    def is_followed(self) -> bool:
        """Whether this is the thread that is followed: the first that differentiates or steps, until it ends.

        Of what another one trains gradients are freed at any time, also while they are read.
        """
        thread = self._thread
        if not self.is_own or thread is None or thread.ident == threading.get_ident() or not thread.is_alive():
            return self.is_own
        return self.in_backward and torch._C._current_graph_task_id() != -1  # a thread of autograd's, for a GPU

    def trains(self) -> bool:
        """Note that the thread differentiates or steps; returns whether it is followed."""
        if not self.is_own:
            return False
        if not self.is_followed():
            self.stream.leave()
            if self._is_alone and self._thread is not None:
                self._is_alone = False
                self.recorder.write("threads")
                self._keep_own()
            return False
        callers = set(self.names.callers.values())
        mine = threading.get_ident() in callers or not self.names.given
        if mine and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.current_thread()
            if not self._is_alone or callers - {self._thread.ident}:
                self._keep_own()
        return True

    def _keep_own(self) -> None:
        """Let go of what is not trained by the thread that is followed."""
        self.names.keep_called(cast(int, cast(threading.Thread, self._thread).ident))
        kept = self.names.owners
        for optimizer in list(self.optimizers):
            if not any(id(p) in kept for group in optimizer.param_groups for p in group["params"]):
                del self.optimizers[optimizer]

    @property
    def is_ours(self) -> bool:
        """Whether what runs now is part of a model's call, a backward pass or a replay."""
        return self.in_model or self.in_backward or self.tape.is_replaying

    @property
    def turn(self) -> int:
        """Attempts so far, of the optimizer that made fewest: two optimizers take turns, and each is inspected.

        One that made next to none while another made many is not used.
        """
        made = [self.attempts.get(optimizer, 0) for optimizer in self.optimizers]
        return min((count for count in made if count * 20 >= self.step - 4), default=self.step)

    def attempted(self, optimizer: Any) -> None:
        """An optimizer has stepped, or was to step."""
        self.attempts[optimizer] = self.attempts.get(optimizer, 0) + 1
        self.step = max(self.step, self.attempts[optimizer])

    def parameters(self) -> list[Tensor]:
        """The parameters of all models, and those that optimizers step."""
        owned = self.names.owners
        stepped = [p for one in self.optimizers for g in one.param_groups for p in g["params"]]
        others = {id(p): p for p in stepped if id(p) not in owned}
        return [*self.names.parameters(), *others.values()]

    def trials(self, tape: Tape | None = None, *of_losses: Any) -> Trials:
        """What does this step again, or that of another tape; `of_losses`: what more `Trials` takes."""
        return Trials(tape or self.tape, self.names, self.parameters(), *of_losses)

    def stop_waiting(self) -> Shadowed | None:
        """Follow no more of what the script does before its models run; what was followed, if anything."""
        shadowed = self.shadowed
        if shadowed is None or not shadowed.between:
            return None
        self.stream.remove(shadowed)
        self.tape.close_window()
        self.shadowed = None
        return shadowed

    def tell(self, facts: Iterable[Fact], trials: Trials | None) -> None:
        """Tell of facts, each with a fix that was tried; `trials`: None where the step is not to be done again."""
        for fact in facts:
            why = "it ran in no step that was done again"
            cure = untried(fact, self.tape, why) if trials is None else trials.cure(fact)
            self.emit(Deviated(fact, *cure))

    def report(self, finding: Finding) -> None:
        """Record a finding, once for each place; nothing more once the observation has failed."""
        if self.is_given_up:
            return
        step = self.step if finding.step is None else finding.step
        finding = replace(finding, file=shown_path(finding.file, self._base), step=step)
        key = (finding.code, finding.severity, finding.module, finding.op, finding.file, finding.line)
        if key not in self._reported:
            self._reported.add(key)
            self.recorder.write("finding", **finding.to_dict())

    def raised(self, error: BaseException, trace: Any = None) -> None:
        """An error came up in a model, its loss or a scaler; a script may catch it and go on."""
        if self.is_own:
            module = self.names.raised_in(error)
            self.emit(Raised(type(error).__name__, str(error), raised_at(error, trace), module))

    def noting_errors(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its errors reported."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return around(*args, **kwargs)
            except Exception as error:
                self.raised(error)
                raise

        return call

    def uncaught(self, kind: Any, error: Any, trace: Any) -> None:
        """The script ends by this error."""
        with _uninterrupted():
            self.recorder.write("raised", type=getattr(kind, "__name__", str(kind)), text=str(error)[:2000])
            self.raised(error, trace)
            without_ours(error)

    def _failed(self, error: Exception) -> None:
        """Record an error of the doctor, end the observation, and let the script go on undisturbed."""
        if self.is_own and not self.is_given_up:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            self.recorder.write("failed", step=self.step, error=repr(error)[:500], trace="".join(lines)[-4000:])
        self.is_given_up = True
        self.stream.give_up()
        for stop in self.on_failure:
            stop()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Have a second Ctrl-C wait: the first is yet to be recorded."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
