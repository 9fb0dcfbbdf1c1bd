"""Saving, at once or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..session import Session
from ._content import AnyPath, Models, Optimizers, check_loadable, kept_on_host, states_of
from ._file import write
from ._later import PendingSave, writer


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
