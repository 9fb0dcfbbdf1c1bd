"""Loading: all objects or none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from ..errors import CheckpointError, OptimizerError, PreampError, PreampWarning, StateError, kind_of
from ..session import Session, sessions_of
from ._arguments import AnyPath, Models, Optimizers, check_path, check_session, kept_on_host, named
from ._file import read
from ._fitting import NAMES, fitting, names_of
from ._masters import BITS, Beside, in_full, joined
from ._save import finish


def load(
    path: AnyPath, model: Models | None = None, *, optimizer: Optimizers | None = None, session: Session | None = None,
    **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Read a checkpoint, load what is named into the objects given, and return the whole content, on the CPU.

    All or nothing, for which copies of the objects' states are in host memory meanwhile. Masters and moments may have
    been kept in another form.

    Args:
        path: What `save` or `save_async` wrote.
        model: One, or as many as were saved, in a list or by their names.
        optimizer: As `model`.
        session: What `prepare` returned for them. Without it, where a run would go on from the session's state in the
            file (with `optimizer`, or a prepared model), a `PreampWarning` says that it stays there.
        **extra: Objects with `state_dict` and `load_state_dict` (an LR scheduler), by the names they were saved under.

    Raises:
        CheckpointError: For a file that is not one, is damaged, lacks what an object needs or does not fit it.
        StateError: When it does not fit the session.
        OSError: When it cannot be opened.

    >>> content = preamp.checkpoint.load("last.pt", model=model, optimizer=optimizer, session=session)
    """
    check_path(path)
    models = {} if model is None else named("model", model, "load_state_dict")
    optimizers = {} if optimizer is None else named("optimizer", optimizer, "load_state_dict")
    check_session(session, models.values(), optimizers.values())
    extra = {name: target for name, target in extra.items() if target is not None}
    if session is not None and "amp" in extra:
        raise CheckpointError("'amp' is the name of the session's own state: give session= or amp=, not both")
    for name, target in extra.items():
        if isinstance(target, type) or not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            raise CheckpointError(
                f"{name}= is an object to load into, with a load_state_dict; got {kind_of(target)}: read such a "
                f"value from what load() returns, load(path)[{name!r}]"
            )
    # A session gives the model's masters back as they were before the model takes others. An optimizer that keeps bits
    # of masters itself joins them to the weights.
    targets = {
        **({} if session is None else {"amp": Beside(session, models.values())}),
        **{name: in_full(each, session) for name, each in models.items()},
        **optimizers,
        **extra,
    }
    finish()
    content = read(path)
    try:
        for name, bits in content.pop(BITS, {}).items():
            joined(content[name], bits)
    except (StateError, LookupError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} has bits of masters that are none of its models' ({error})") from error
    names = content.pop(NAMES, {})
    if missing := targets.keys() - content:
        raise CheckpointError(f"{path} has no {', '.join(map(repr, sorted(missing)))}; it has {', '.join(content)}")
    parts = [(name, target, fitting(name, target, content[name], path)) for name, target in targets.items()]
    for name, each in optimizers.items():
        own = names_of(models, each) if content[name].get("state", True) else names.get(name)
        if (saved := names.get(name, own)) != own and sorted(saved) == sorted(own):
            raise CheckpointError(
                f"{path} has the states of the {name}'s parameters in another order, so they would go to others, and "
                "nothing was loaded. Give the optimizer its parameters in the order in which they were"
            )
    _load_together(parts, path)
    prepared = sessions_of(*(each for each in models.values() if isinstance(each, nn.Module)))
    if session is None and "amp" not in extra and (optimizers or prepared):
        tell_left(content.get("amp"), path)
    return content


def tell_left(amp: Any, path: Any) -> None:
    """A `PreampWarning` for the state of a session, or of a scaler, that the run does not go on with."""
    if not isinstance(amp, Mapping) or {"losses", "loss_scaler0", "growth_factor", "loss_scaler"}.isdisjoint(amp):
        return
    whose, instead = "a loss scaler", "prepare with its scale, scale=preamp.DynamicScale(init_scale=...)"
    if "losses" in amp:
        whose, instead = f"a session after {amp.get('steps')} steps", "prepare() first, and give session=session"
    warnings.warn(
        f"{path} has the state of {whose}, and was given nothing to load it into: loss scales and counts of "
        f"steps begin anew. To go on with them, {instead}",
        PreampWarning,
        stacklevel=3,
    )


def _load_together(parts: list[tuple[str, Any, Any]], path: Any) -> None:
    before = [kept_on_host(target.state_dict()) for _, target, _ in parts]
    begun = 0
    try:
        for _, target, state in parts:
            begun += 1
            target.load_state_dict(state)
    except BaseException as error:
        for (_, target, _), state in reversed(list(zip(parts[:begun], before, strict=False))):
            with suppress(Exception):  # the one that failed may fail again; the others are to be as they were
                target.load_state_dict(state)
        told = isinstance(error, PreampError) and not isinstance(error, OptimizerError)
        if told or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{path} does not fit the {parts[begun - 1][0]} it is loaded into, so nothing was loaded: {error}"
        ) from error
