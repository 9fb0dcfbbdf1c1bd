"""Checkpoints: everything a training run needs to go on bit for bit, in one file that cannot be half written.

A file is a zip archive made by `torch.save`, read with `weights_only=True`, so that loading never runs code from it. It
holds a digest of its tensors: a flipped bit is an error, and not a slightly different training run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import CheckpointError
from .session import Session
from .tree import tensors

FORMAT = "preamp-checkpoint/1"


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    session: Session | None = None,
    **extra: Any,
) -> None:
    """Write a checkpoint, atomically: the file is complete, or it is the one that was there before.

    `model`, `optimizer`: one, or a mapping of several. `extra`: further states to keep, of tensors, numbers, strings,
    lists and dicts, or objects with a `state_dict` (an LR scheduler). Parallel wrappers are saved as they are named.
    """
    content: dict[str, Any] = {"model": _states(model)}
    if optimizer is not None:
        content["optimizer"] = _states(optimizer)
    if session is not None:
        content["amp"] = session.state_dict()
    for name, value in extra.items():
        if name in ("format", "digest"):
            raise CheckpointError(f"{name!r} is a name that checkpoints use themselves; choose another")
        content[name] = value.state_dict() if hasattr(value, "state_dict") else value
    content["format"] = FORMAT
    content["digest"] = _digest(content)
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    session: Session | None = None,
    map_location: Any = "cpu",
) -> dict[str, Any]:
    """Read a checkpoint, load what is named into the objects given, and return the whole content.

    Raises `CheckpointError` for a file that is not one, is damaged, or lacks what an object needs; `FileNotFoundError`
    when there is none.
    """
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: it is truncated, foreign, or holds objects that would have to run "
            f"code to load ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        seen = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} was not written by preamp.checkpoint.save (format {seen!r}, not {FORMAT!r})")
    if _digest(content) != content["digest"]:
        raise CheckpointError(f"{path} is damaged: its content does not match the digest it was saved with")
    for key, target in (("model", model), ("optimizer", optimizer), ("amp", session)):
        if target is not None and key not in content:
            raise CheckpointError(f"{path} has no {key!r}; it has {', '.join(sorted(content))}")
    if model is not None:
        _restore(model, content["model"], path)
    if optimizer is not None:
        _restore(optimizer, content["optimizer"], path)
    if session is not None:
        session.load_state_dict(content["amp"])
    return content


def _states(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"several": {name: item.state_dict() for name, item in value.items()}}
    return value.state_dict()


def _restore(value: Any, state: Any, path: Any) -> None:
    if not isinstance(value, Mapping):
        value.load_state_dict(state)
        return
    several = state.get("several", {})
    if set(several) != set(value):
        raise CheckpointError(f"{path} holds {', '.join(several) or 'one object'}; asked for: {', '.join(value)}")
    for name, item in value.items():
        item.load_state_dict(several[name])


def _digest(content: Mapping[str, Any]) -> str:
    """A hash over the bytes of every tensor, in order, with dtype and shape."""
    digest = hashlib.sha256()
    for tensor in tensors({key: value for key, value in content.items() if key != "digest"}):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout is torch.strided:
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _sync_directory(directory: Path) -> None:
    """Make the rename itself survive a power cut, where the system allows it."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
