"""Saving, at once or in the background, in the order of the calls; no failure goes unreported."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ..errors import CheckpointError, PreampWarning
from ..session import Session
from ._content import AnyPath, Models, Optimizers, check_loadable, kept_on_host, states_of
from ._file import write


def save(
    path: AnyPath, *, model: Models, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> None:
    """Write a checkpoint, atomically: the file is complete, or it is the one that was there before.

    `model`, `optimizer`: one, or a mapping of several. `extra`: further states to keep, of tensors, numbers, strings,
    lists and dicts, or objects with a `state_dict` (an LR scheduler). Parallel wrappers are saved as they are named.
    The folder must exist. Returns when file and name are on the disk.

    Raises `CheckpointError` for content that could not be loaded, and `OSError`, with the path and the system's reason
    (a full disk), when it cannot be written; the old file stays, and no other is left.
    """
    content = _content(model, optimizer, session, extra)
    writer().finish(path)
    with writer().reporting():
        write(path, content)


def save_async(
    path: AnyPath, *, model: Models, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> PendingSave:
    """As `save`, but only copies the states before it returns; a thread writes them while training goes on.

    Costs a copy of all states in host memory until the file is written; with two under way, the call waits for the
    older one. Files are written in the order of the calls. `wait()` on what is returned raises what went wrong; without
    `wait()` a failure is a `PreampWarning` at the next save, or when the interpreter exits, which waits for saves.

    >>> pending = preamp.checkpoint.save_async("last.pt", model=model, optimizer=optimizer, session=session)
    >>> train_another_epoch()
    >>> pending.wait()
    """
    content = kept_on_host(_content(model, optimizer, session, extra))
    pending = PendingSave(path, lambda: write(path, content))
    with writer().reporting():
        writer().submit(pending)
    return pending


def _content(model: Any, optimizer: Any, session: Session | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"model": states_of(model)}
    if optimizer is not None:
        content["optimizer"] = states_of(optimizer)
    if session is not None:
        content["amp"] = session.state_dict()
    for name, value in extra.items():
        if name in ("format", "digest") or (name == "amp" and session is not None):
            raise CheckpointError(f"{name!r} is a name that checkpoints use themselves; choose another")
        content[name] = value.state_dict() if hasattr(value, "state_dict") else value
    check_loadable(content)
    return content


# -- in the background

_WAITING = 2
"""Saves that may be in progress at once, each with a copy of its states in memory; the next call waits."""


class PendingSave:
    """A save in progress. Call `wait()` before relying on the file; `done` does not wait."""

    def __init__(self, path: AnyPath, write: Callable[[], None]) -> None:
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
        with suppress(ValueError):
            _writer.failed.remove(self)  # the caller has seen it
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "under way" if not self.done else ("written" if self._error is None else f"failed: {self._error}")
        return f"PendingSave({self.path!r}, {state})"


class _Writer:
    """Runs saves one after another, each in a thread that waits for the save before it.

    No thread is a daemon: the interpreter waits for them before it exits, so a save that was begun is completed.
    """

    def __init__(self) -> None:
        self._submitting = threading.Lock()
        self._queue: list[PendingSave] = []
        """Saves that have not ended, the oldest first. A save leaves it before its event is set."""
        self.failed: list[PendingSave] = []
        """Saves whose failure the caller has not seen."""

    def submit(self, pending: PendingSave) -> None:
        """Start a save, when there is room for it."""
        with self._submitting:
            while len(earlier := list(self._queue)) >= _WAITING:
                earlier[0]._ended.wait()
            self._queue.append(pending)
            work = partial(self.run, pending, earlier[-1] if earlier else None)
            try:
                threading.Thread(target=work, name="preamp-checkpoint", daemon=False).start()
            except RuntimeError:  # the interpreter is exiting and starts no more threads
                work()

    def run(self, pending: PendingSave, earlier: PendingSave | None = None) -> None:
        """Run a save in this thread, after the earlier one has ended."""
        if earlier is not None:
            earlier._ended.wait()
        assert pending._write is not None
        try:
            pending._write()
        except BaseException as error:
            pending._error = error
            self.failed.append(pending)
        pending._write = None  # lets go of the copied states
        with suppress(ValueError):  # one that was not submitted is not in it
            self._queue.remove(pending)
        pending._ended.set()

    def finish(self, path: AnyPath) -> None:
        """Wait until nothing is being written to `path`."""
        wanted = os.path.realpath(path)
        while found := [pending for pending in list(self._queue) if os.path.realpath(pending.path) == wanted]:
            found[-1]._ended.wait()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """After the block, warn of saves that had failed before it and whose failure was not seen by the caller."""
        failed, self.failed = self.failed, []
        try:
            yield
        finally:
            for pending in failed:
                error = pending._error
                warnings.warn(
                    f"a checkpoint was not saved: {pending.path} ({type(error).__name__}: {error}). The file there, if "
                    "any, is an older one. Keep what save_async() returns and call its wait()",
                    PreampWarning,
                    stacklevel=4,  # the caller of save, behind this, its context and save
                )


_writer = _Writer()


def writer() -> _Writer:
    """The process's writer."""
    return _writer


def _after_fork(*_: Any) -> None:
    global _writer
    _writer = _Writer()  # the threads stayed with the parent, and so do its saves


def _at_exit() -> None:
    with _writer.reporting():
        pass


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
