"""Loading: all objects or none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import CheckpointError, OptimizerError, PreampError, PreampWarning, kind_of
from ..session import Session, sessions_of
from ._arguments import by_name, check_devices, check_path, check_session
from ._content import AnyPath, Models, Optimizers, kept_on_host, several_in
from ._file import read
from ._fitting import fitting
from ._masters import in_full, with_masters
from ._save import finish


def load(
    path: AnyPath, *, model: Models | None = None, optimizer: Optimizers | None = None, session: Session | None = None,
    map_location: Any = "cpu", **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Read a checkpoint, load what is named into the objects given, and return the whole content.

    All or nothing: if one object does not accept its state, those before it get back what they had; for that, copies of
    their states are kept in host memory during the call. Waits for a `save_async`. `extra`: further objects, by the
    names they were saved under, with `state_dict` and `load_state_dict` (an LR scheduler); None is left out. Without
    `session`, a float32 model and the masters of a prepared one get the values of the masters in the file, where that
    has them, and not the 16-bit weights; a `PreampWarning` says that the rest of a session's state stays in the file,
    where a run would go on from it (with `optimizer`, or a prepared model). Optimizers that are not preamp's get
    moments in 8 bits as float32.

    Raises `CheckpointError` for a file that is not one, is damaged, lacks what an object needs or does not fit it;
    `StateError` when it does not fit the session; `OSError` when it cannot be opened.
    """
    check_path(path)
    check_devices(map_location)
    model = None if model is None else by_name("model", model, "load_state_dict")
    optimizer = None if optimizer is None else by_name("optimizer", optimizer, "load_state_dict")
    check_session(session, model, optimizer)
    finish()
    models = model.values() if isinstance(model, Mapping) else [model]
    model = with_masters(model, session)
    content = read(path, map_location)
    extra = {key: target for key, target in extra.items() if target is not None}
    if session is not None and "amp" in extra:
        raise CheckpointError("'amp' is the name of the session's own state: give session= or amp=, not both")
    for key, target in extra.items():
        if isinstance(target, type) or not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            raise CheckpointError(
                f"{key}= is an object to load into, with a load_state_dict; got {kind_of(target)}: read such a "
                f"value from what load() returns, load(path)[{key!r}]"
            )
    for key, target in (("model", model), ("optimizer", optimizer), ("amp", session), *extra.items()):
        if target is not None and key not in content:
            raise CheckpointError(f"{path} has no {key!r}; it has {', '.join(sorted(content))}")
    # The optimizer first: loading its state lets masters follow the model's weights, which must still be the old ones
    # if something goes wrong.
    weights = content["model"] if model is not None else None
    if model is not None and session is None:
        weights = in_full(weights, content.get("amp"), model, path)
    parts = [
        *(_paired("optimizer", optimizer, content["optimizer"], path) if optimizer is not None else ()),
        *(_paired("model", model, weights, path) if model is not None else ()),
        *([("session", session, content["amp"])] if session is not None else ()),
        *((key, target, content[key]) for key, target in extra.items()),
    ]
    _load_together([(what, target, fitting(what, target, state, path)) for what, target, state in parts], path)
    if optimizer is not None or sessions_of(*(each for each in models if isinstance(each, nn.Module))):
        tell_left(None if session is not None or "amp" in extra else content.get("amp"), path)
    return content


def tell_left(amp: Any, path: Any) -> None:
    """A `PreampWarning` for the state of a session, or of a scaler, that the run does not go on with."""
    if not isinstance(amp, Mapping) or {"losses", "loss_scaler0", "growth_factor", "loss_scaler"}.isdisjoint(amp):
        return
    whose, instead = "a loss scaler", "call preamp.checkpoint.adopt_scale(session, content['amp']) with what it returns"
    if "losses" in amp:
        whose, instead = f"a session after {amp.get('steps')} steps", "prepare() first, and give session=session"
    warnings.warn(
        f"{path} has the state of {whose}, and was given nothing to load it into: loss scales and counts of "
        f"steps begin anew. To go on with them, {instead}",
        PreampWarning,
        stacklevel=3,
    )


def _paired(what: str, value: Any, state: Any, path: Any) -> Iterator[tuple[str, Any, Any]]:
    """(its name, object, its state) of one object or of each in a mapping."""
    several = several_in(state)
    if not isinstance(value, Mapping):
        if several is not None:
            raise CheckpointError(
                f"{path} holds several: {', '.join(map(str, several))}; load them by name, {what}={{name: ...}}"
            )
        yield what, value, state
        return
    if several is None or set(several) != set(value):
        held = "one object" if several is None else ", ".join(map(str, several)) or "none"
        raise CheckpointError(f"{path} holds {held}; asked for: {', '.join(map(str, value))}")
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
        told = isinstance(error, PreampError) and not isinstance(error, OptimizerError)
        if told or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{path} does not fit the {parts[begun - 1][0]} it is loaded into, so nothing was loaded: {error}"
        ) from error
