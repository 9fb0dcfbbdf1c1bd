"""`watch`: the doctor from code, around a part of a program."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import SessionError, kind_of
from ...report import Finding, Report
from ...session import Session
from ..follow.watch import Watch
from ..names import Names
from ..records import NOWHERE, Rank, Recorder, Sink
from ..tell.report import all_findings, build, write

Watchable = Session | nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]


class Watching:
    """A watch that is going on, made by `watch`; a context manager."""

    def __init__(self, watched: Watchable, every: int, replay: bool, sinks: Sequence[Sink]) -> None:
        models = _models(watched)
        self._kept, self._sinks = Rank(0), tuple(sinks)
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        self._base = Path(script).resolve().parent if script else Path.cwd()
        outer = Watch.of_this_process()
        self._own, self._open = outer is None, True
        if outer is None:
            recorder = Recorder(self._kept, *self._sinks)
            names = Names(models)
            self._watch = Watch(recorder, self._base, every, None, replay, names)
            self._watch.run.optimizers.update(dict.fromkeys(names.optimizers(), NOWHERE))
            if isinstance(watched, Session):
                self._watch.scales.sessions.add(watched)
            self._watch.start()
        else:
            self._watch = outer
            outer.run.recorder.sinks += (self._kept, *self._sinks)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those so far, most harmful first."""
        return all_findings([self._kept], self._base)

    def report(self) -> Report:
        """Everything seen so far: a verdict, findings, and the run over time. It may be called at any moment."""
        return self._build()[0]

    def write(self, folder: str | Path) -> Path:
        """Write `report.html` and `report.json` (its schema is that of `preamp doctor`); returns the page's path."""
        return write(*self._build(), Path(folder), "report", None)

    def _build(self) -> tuple[Report, dict[str, Any]]:
        ended = "still under way" if self._open else "watched to its end"
        script = [Path(sys.argv[0]).name or "python"] if sys.argv else ["python"]
        return build([self._kept], self._base, script, 0, ended, self._watch.run.clock.seconds)

    def close(self) -> None:
        """End the watch. torch is as it was before; what was seen can still be reported."""
        if not self._open:
            return
        self._open = False
        if self._own:
            self._watch.end()
        else:
            recorder, own = self._watch.run.recorder, (self._kept, *self._sinks)
            recorder.sinks[:] = (sink for sink in recorder.sinks if sink not in own)

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(watched: Watchable, *, every: int = 50, replay: bool = True, sinks: Sequence[Sink] = ()) -> Watching:
    """Watch the training of a session or of models, as `preamp doctor` watches a script.

    While it is open, torch's backward, steps, scalers and autocast are wrapped, for the process; `close`, or leaving
    the `with` block, takes that back. What the training computes is not changed. Within another watch, or in a script
    that runs under `preamp doctor`, it listens to that one, whose `every` and `replay` hold.

    Args:
        watched: A session, a model, or several (a mapping gives them names).
        every: Magnitudes of activations, weights, gradients and updates are counted in one of so many steps.
        replay: Do a step that was not finite again, to find the operator that made it so.
        sinks: Take every record as it is made: `JsonLines(path)`, or anything with `write(kind, facts)`.

    Raises:
        SessionError: For what cannot be watched.

    >>> with preamp.doctor.watch(session, every=50, sinks=[preamp.doctor.JsonLines("steps.jsonl")]) as w:
    ...     train(session)
    >>> w.report().verdict
    'Nothing is wrong with the precision of what was looked at ...'
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SessionError(f"every= is a number of steps, 1 or more; got {every!r}")
    for sink in sinks:
        if not callable(getattr(sink, "write", None)):
            raise SessionError(f"a sink has write(kind, facts); {kind_of(sink)} has not")
    return Watching(watched, every, replay, sinks)


def _models(watched: Any) -> dict[str, nn.Module]:
    if isinstance(watched, Session):
        return dict(watched.models)
    if isinstance(watched, nn.Module):
        return {"model": watched}
    several = isinstance(watched, Sequence) and not isinstance(watched, str)
    named = watched.items() if isinstance(watched, Mapping) else enumerate(watched) if several else ()
    models = {str(name): model for name, model in named}
    if not models or not all(isinstance(model, nn.Module) for model in models.values()):
        raise SessionError(
            f"watch() takes a Session, a torch.nn.Module, or several modules; got {kind_of(watched)}"
            + (" without any" if isinstance(watched, (Mapping, list, tuple)) and not models else "")
        )
    return models
