"""Saving, at once or in the background: one save after another, and no failure is silent."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from ..errors import CheckpointError, PreampWarning
from ..session import Session
from ._arguments import AnyPath, Models, Optimizers, check_loadable, check_path, check_session, kept_on_host, named
from ._file import write
from ._fitting import NAMES, names_of
from ._masters import BITS, Beside, InFloat32, in_full


def save(
    path: AnyPath, model: Models, *, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> None:
    """Write a checkpoint, atomically: the file is complete, or it is the one that was there before.

    Args:
        path: The file; its folder exists.
        model: One, or a list or mapping of several. Parallel wrappers keep their names. A prepared model is saved as
            its masters: float32, or bfloat16 weights and the bits that these lack.
        optimizer: One, or a list or mapping of several.
        session: What `prepare` returned for them.
        **extra: States to keep, of tensors, numbers, strings, lists and dicts, or objects with a `state_dict`.

    Raises:
        CheckpointError: For content that could not be loaded, and for the session of other models.
        OSError: When the file cannot be written (a full disk, no folder); the old one stays.

    >>> preamp.checkpoint.save("last.pt", model=model, optimizer=optimizer, session=session, step=7)
    """
    content = _content(path, model, optimizer, session, extra)
    finish()
    write(path, content)


def save_async(
    path: AnyPath, model: Models, *, optimizer: Optimizers | None = None, session: Session | None = None, **extra: Any
) -> Future[None]:
    """As `save`, but only copies the states before it returns; a thread writes them while training goes on.

    The copy is in host memory until then. The next save or load waits for that, and so does the interpreter at its
    exit. A failure is also a `PreampWarning` when it happens.

    Args:
        path: The file.
        model: One or several, as in `save`.
        optimizer: One or several, as in `save`.
        session: The session of these, if there is one.
        **extra: What else to keep, as in `save`.

    Returns:
        A future whose `result()` waits for the file, and raises what went wrong.

    Raises:
        CheckpointError: For what `save` refuses; before anything is copied.

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
    models, optimizers = named("model", model), {} if optimizer is None else named("optimizer", optimizer)
    check_session(session, models.values(), optimizers.values())
    content: dict[str, Any] = {}
    bits: dict[str, Any] = {}
    for name, each in models.items():
        whole = in_full(each, session)
        content[name], bits[name] = whole.parts() if isinstance(whole, InFloat32) else (whole.state_dict(), {})
    content.update({name: each.state_dict() for name, each in optimizers.items()})
    if session is not None:
        content["amp"] = Beside(session, models.values()).state_dict()
    for name, value in extra.items():
        if name in ("format", BITS, NAMES) or name in content:
            raise CheckpointError(f"{name!r} is a name that checkpoints use themselves; choose another")
        if isinstance(value, Session):
            raise CheckpointError(f"{name}= is a session: give it as session=, so that its masters are in the model's")
        content[name] = value.state_dict() if hasattr(value, "state_dict") and not isinstance(value, type) else value
    for name, state in content.items():
        check_loadable(state, name)
    content[NAMES] = {name: names_of(models, each) for name, each in optimizers.items()}
    return {**content, BITS: bits} if any(bits.values()) else content


_under_way: list[Thread] = []


def in_background(path: AnyPath, work: Callable[[], None]) -> Future[None]:
    """Do `work`, which writes to `path`, in a thread for which the interpreter waits."""
    saving: Future[None] = Future()

    def write() -> None:
        try:
            work()
            saving.set_result(None)
        except BaseException as error:
            saving.set_exception(error)
            warnings.warn(  # nobody may ask for the result
                f"a checkpoint was not saved: {os.fspath(path)} ({type(error).__name__}: {error}). The file there, if "
                "any, is an older one",
                PreampWarning,
                stacklevel=1,
            )

    thread = Thread(target=write, name="preamp-checkpoint")
    thread.start()
    _under_way[:] = [*(each for each in _under_way if each.is_alive()), thread]
    return saving


def finish() -> None:
    """Wait until nothing is being written in the background; a forked child has nothing to wait for."""
    for each in tuple(_under_way):
        each.join()
