"""Writing in the background: one thread, in the order of the calls, and no failure goes unreported."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PreampWarning

_WAITING = 2
"""Saves that may be in progress at once, each with a copy of its states in memory; the next call waits."""


class PendingSave:
    """A save in progress. Call `wait()` before relying on the file; `done` does not wait."""

    def __init__(self, path: str | os.PathLike[str], write: Callable[[], None]) -> None:
        self.path = os.fspath(path)
        """The path of the file."""
        self._write: Callable[[], None] | None = write
        self._ended = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the file is on the disk, and raise what went wrong; after `timeout` seconds, `TimeoutError`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.path} is still being written after {timeout} s")
        _writer.heard(self)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._write()
        except BaseException as error:
            self._error = error
        self._write = None  # lets go of the copied states

    def __repr__(self) -> str:
        state = "under way" if not self.done else ("written" if self._error is None else f"failed: {self._error}")
        return f"PendingSave({self.path!r}, {state})"


class _Writer:
    """Runs saves one after another in a thread that lives while there are any.

    It is no daemon: the interpreter waits for it before it exits, so a save that was begun is completed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[PendingSave] = deque()
        self._failed: list[PendingSave] = []
        self._running = False

    def submit(self, pending: PendingSave) -> None:
        """Queue a save."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < _WAITING)
            self._queue.append(pending)
            if self._running:
                return
            self._running = True
        try:
            threading.Thread(target=self._run, name="preamp-checkpoint", daemon=False).start()
        except RuntimeError:  # the interpreter is exiting and starts no more threads
            self._run()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._running = False
                    return
                pending = self._queue[0]
            self.run(pending)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def run(self, pending: PendingSave) -> None:
        """Run a save in this thread."""
        pending._run()
        with self._changed:
            if pending._error is not None:
                self._failed.append(pending)
            pending._ended.set()

    def finish(self, path: str | os.PathLike[str]) -> None:
        """Wait until nothing is being written to `path`."""
        wanted = os.path.realpath(path)
        with self._changed:
            self._changed.wait_for(lambda: all(os.path.realpath(p.path) != wanted for p in self._queue))

    def heard(self, pending: PendingSave) -> None:
        """Record that the caller has seen how a save ended."""
        with self._changed:
            if pending in self._failed:
                self._failed.remove(pending)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """After the block, warn of saves that had failed before it and whose failure was not seen by the caller."""
        with self._changed:
            failed, self._failed = self._failed, []
        try:
            yield
        finally:
            _warn(failed)


def _warn(failed: list[PendingSave]) -> None:
    for pending in failed:
        error = pending._error
        warnings.warn(
            f"a checkpoint was not saved: {pending.path} ({type(error).__name__}: {error}). The file there, if "
            "any, is an older one. Keep what save_async() returns and call its wait()",
            PreampWarning,
            stacklevel=5,  # who called save, behind this, `telling`, its context and save
        )


_writer = _Writer()


def writer() -> _Writer:
    """The process's writer."""
    return _writer


def _after_fork(*_: Any) -> None:
    global _writer
    _writer = _Writer()  # the thread stayed with the parent, and so do its saves


def _at_exit() -> None:
    with _writer.telling():
        pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
