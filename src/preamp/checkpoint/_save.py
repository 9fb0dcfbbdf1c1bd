"""Saving, at once or in the background: one save after another, and no failure is silent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from ..errors import CheckpointError, PreampWarning
from ..session import Session
from ._arguments import by_name, check_path, check_session
from ._content import AnyPath, Models, Optimizers, check_loadable, kept_on_host, states_of
from ._file import write
from ._masters import with_masters


def save(
    path: AnyPath, *, model: Models, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> None:
    """Write a checkpoint, atomically: the file is complete, or it is the one that was there before.

    `model`, `optimizer`: one, or a list or mapping of several. `extra`: further states to keep, of tensors, numbers,
    strings, lists and dicts, or objects with a `state_dict` (an LR scheduler). Parallel wrappers are saved as they are
    named. Without `session`, the state of a prepared model has its float32 masters in place of the 16-bit weights. The
    folder must exist. Returns when file and name are on the disk.

    Raises `CheckpointError` for content that could not be loaded and for the session of other models, and `OSError`,
    with the path and the system's reason (a full disk), when it cannot be written; the old file stays, and no other is
    left.
    """
    content = _content(path, model, optimizer, session, extra)
    finish()
    write(path, content)


def save_async(
    path: AnyPath, *, model: Models, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> Future[None]:
    """As `save`, but only copies the states before it returns; a thread writes them while training goes on.

    The copy is held in host memory until the file is written. The next call that saves or loads waits for that, and so
    does the interpreter when it exits. `result()` of what is returned waits too, and raises what went wrong; a failure
    is also a `PreampWarning` when it happens.

    >>> saving = preamp.checkpoint.save_async("last.pt", model=model, optimizer=optimizer, session=session)
    >>> train_another_epoch()
    >>> saving.result()
    """
    content = _content(path, model, optimizer, session, extra)
    finish()
    kept = kept_on_host(content)
    return in_background(path, lambda: write(path, kept))


def _content(
    path: Any, model: Any, optimizer: Any, session: Session | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    check_path(path)
    model, optimizer = by_name("model", model), None if optimizer is None else by_name("optimizer", optimizer)
    check_session(session, model, optimizer)
    content: dict[str, Any] = {"model": states_of(with_masters(model, session))}
    if optimizer is not None:
        content["optimizer"] = states_of(optimizer)
    if session is not None:
        content["amp"] = session.state_dict()
    for name, value in extra.items():
        if name in ("format", "map_location") or (name == "amp" and session is not None):
            raise CheckpointError(f"{name!r} is a name that checkpoints use themselves; choose another")
        content[name] = value.state_dict() if hasattr(value, "state_dict") and not isinstance(value, type) else value
    check_loadable(content)
    return content


# -- in the background

_thread: ThreadPoolExecutor
_under_way: set[Future[None]]


def _start() -> None:
    """Begin with nothing under way; so does a forked child, which has none of its parent's threads."""
    global _thread, _under_way
    _thread, _under_way = ThreadPoolExecutor(1, "preamp-checkpoint"), set()


_start()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start)


def in_background(path: AnyPath, work: Callable[[], None]) -> Future[None]:
    """Do `work`, which writes to `path`, in the thread for that."""
    saving = _thread.submit(work)
    _under_way.add(saving)
    saving.add_done_callback(partial(_ended, path))
    return saving


def _ended(path: AnyPath, saving: Future[None]) -> None:
    _under_way.discard(saving)
    if (error := saving.exception()) is not None:  # nobody may ask for the result
        warnings.warn(
            f"a checkpoint was not saved: {os.fspath(path)} ({type(error).__name__}: {error}). The file there, if any, "
            "is an older one",
            PreampWarning,
            stacklevel=1,
        )


def finish() -> None:
    """Wait until nothing is being written in the background."""
    wait(list(_under_way))
