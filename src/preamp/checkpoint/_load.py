"""Loading: all that is named, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, PreampError
from ..session import Session
from ._content import kept_on_host
from ._file import read
from ._fitting import check_states
from ._later import writer


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    session: Session | None = None,
    map_location: Any = "cpu",
) -> dict[str, Any]:
    """Read a checkpoint, load what is named into the objects given, and return the whole content.

    All or nothing: when one object does not take its state, those before it get back what they had, for which a copy
    of their states is kept in host memory meanwhile. Waits for a `save_async` to the same path.

    Raises `CheckpointError` for a file that is not one, is damaged, lacks what an object needs or does not fit it;
    `StateError` when it does not fit the session; `FileNotFoundError` when there is none.
    """
    writer().finish(path)
    content = read(path, map_location)
    for key, target in (("model", model), ("optimizer", optimizer), ("amp", session)):
        if target is not None and key not in content:
            raise CheckpointError(f"{path} has no {key!r}; it has {', '.join(sorted(content))}")
    # The optimizer first: loading its state lets masters follow the model's weights, which must still be the old ones
    # if something goes wrong.
    parts = [
        *(_paired("optimizer", optimizer, content["optimizer"], path) if optimizer is not None else ()),
        *(_paired("model", model, content["model"], path) if model is not None else ()),
        *([("session", session, content["amp"])] if session is not None else ()),
    ]
    for what, target, state in parts:
        if isinstance(target, Optimizer):
            check_states(what, target, state, path)
    _load_together(parts, path)
    return content


def _paired(what: str, value: Any, state: Any, path: Any) -> Iterator[tuple[str, Any, Any]]:
    """(its name, object, its state) of one object or of each in a mapping."""
    if not isinstance(value, Mapping):
        if isinstance(state, Mapping) and set(state) == {"several"}:
            raise CheckpointError(
                f"{path} holds several: {', '.join(state['several'])}; load them by name, {what}={{name: ...}}"
            )
        yield what, value, state
        return
    several = state.get("several", {})
    if set(several) != set(value):
        raise CheckpointError(f"{path} holds {', '.join(several) or 'one object'}; asked for: {', '.join(value)}")
    for name, item in value.items():
        yield f"{what} {name!r}", item, several[name]


def _load_together(parts: list[tuple[str, Any, Any]], path: Any) -> None:
    before = [kept_on_host(target.state_dict()) for _, target, _ in parts]
    begun = 0
    try:
        for _, target, state in parts:
            begun += 1
            target.load_state_dict(state)
    except BaseException as error:
        for (_, target, _), state in reversed(list(zip(parts[:begun], before, strict=False))):
            target.load_state_dict(state)
        if isinstance(error, PreampError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{path} does not fit the {parts[begun - 1][0]} it is loaded into, so nothing was loaded: {error}"
        ) from error
