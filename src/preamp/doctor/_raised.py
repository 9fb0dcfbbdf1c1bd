"""Errors that torch raises for a precision disease, as findings with the line of the script that met them."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ..report import Finding
from ._records import Recorder
from ._stack import in_library, is_users, users_line

_KNOWN: tuple[tuple[str, str, str, str], ...] = (
    ("without overflow", "PA103", "a constant is beyond float16, whose largest number is 65504",
     "torch.finfo(x.dtype).min  # instead of the constant"),
    ("unsafe to autocast", "PA102", "binary cross entropy of probabilities in 16 bits is refused",
     "loss = F.binary_cross_entropy_with_logits(logits, target)  # drop the sigmoid"),
    ("step() has already been called since the last update", "PA107", "scaler.update() is missing after scaler.step()",
     "scaler.step(optimizer)\nscaler.update()  # once a step, after the last optimizer"),
    ("No inf checks were recorded prior to update", "PA107", "scaler.update() runs without a scaler.step() before it",
     "scaler.step(optimizer)\nscaler.update()  # once a step"),
    ("No inf checks were recorded for this optimizer", "PA107", "scaler.step() of an optimizer without gradients",
     "scaler.scale(loss).backward()  # before scaler.step(optimizer), with this optimizer's parameters in the loss"),
    ("was called by itself after session.backward()", "PA107",
     "optimizer.step() takes gradients that are still multiplied by the loss scale",
     "session.step()  # in place of optimizer.step(); or session.step(optimizer)"),
    ("was called by itself, and the session keeps float32 masters", "PA107",
     "loss.backward() and optimizer.step() pass by the session, which scales losses and steps float32 masters: what "
     "the optimizer would write into the 16-bit copies is lost",
     "session.backward(loss)  # in place of loss.backward()\n"
     "session.step()  # in place of optimizer.step(); or session.step(optimizer)"),
    ("unscale_() has already been called", "PA106", "gradients are unscaled twice in one step",
     "# call scaler.unscale_(optimizer) once a step"),
    ("Attempting to unscale FP16 gradients", "PA111", "the parameters are float16: GradScaler wants float32 ones",
     "model = model.float()  # and torch.autocast for the computation; or preamp.prepare(model, optimizer, 'O2')"),
)  # fmt: skip


class Errors:
    """Hears of errors where they come up, as a script may catch them and go on, and of the one that ends it."""

    def __init__(self, recorder: Recorder, tell: Callable[[Finding], None]) -> None:
        self._recorder, self._tell = recorder, tell

    def seen(self, error: BaseException, trace: Any = None) -> None:
        """One came up in a model, its loss or a scaler."""
        found = finding_of(error, trace or error.__traceback__)
        if found is not None and self._recorder.is_own:
            self._tell(found)

    def telling(self, around: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose errors are seen."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return around(*args, **kwargs)
            except Exception as error:
                self.seen(error)
                raise

        return call

    def uncaught(self, original: Any, kind: Any, error: Any, trace: Any) -> None:
        """In place of `sys.excepthook`."""
        if self._recorder.is_own:
            with _uninterrupted():
                self._recorder.write("raised", type=getattr(kind, "__name__", str(kind)), text=str(error)[:2000])
                self.seen(error, trace)
        original(kind, error, trace)


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


def finding_of(error: BaseException, trace: Any) -> Finding | None:
    """The finding that an error stands for, or None; placed by its traceback, or else by who asked for what failed."""
    text = str(error)
    for part, code, message, fix in _KNOWN:
        if part in text:
            file, line = _place(trace)
            severity: Literal["error"] = "error"
            return Finding(
                code, severity, f"{message} ({type(error).__name__})", file=file, line=line,
                evidence=text.splitlines()[0][:300], fix=fix,
            )  # fmt: skip
    return None


def _place(trace: Any) -> tuple[str | None, int | None]:
    own = [f for f in traceback.extract_tb(trace) if is_users(f.filename) and not in_library(f.filename)]
    return (own[-1].filename, own[-1].lineno) if own else users_line()
