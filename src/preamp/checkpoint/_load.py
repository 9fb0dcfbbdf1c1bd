"""Loading: all objects or none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError, OptimizerError, PreampError, kind_of
from ..session import Session
from ..sharding import is_sharded
from ._content import AnyPath, Models, Optimizers, kept_on_host
from ._file import read
from ._save import finish


def load(
    path: AnyPath, *, model: Models | None = None, optimizer: Optimizers | None = None, session: Session | None = None,
    map_location: Any = "cpu", **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Read a checkpoint, load what is named into the objects given, and return the whole content.

    All or nothing: if one object does not accept its state, those before it get back what they had; for that, copies
    of their states are kept in host memory during the call. Waits for a `save_async`. `extra`: further
    objects, by the names they were saved under, with `state_dict` and `load_state_dict` (an LR scheduler); None is left
    out.

    Raises `CheckpointError` for a file that is not one, is damaged, lacks what an object needs or does not fit it;
    `StateError` when it does not fit the session; `FileNotFoundError` when there is none.
    """
    finish()
    content = read(path, map_location)
    extra = {key: target for key, target in extra.items() if target is not None}
    for key, target in extra.items():
        if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            raise CheckpointError(
                f"{key}= is an object to load into, with a load_state_dict; got {kind_of(target)}: read such a "
                f"value from what load() returns, load(path)[{key!r}]"
            )
    for key, target in (("model", model), ("optimizer", optimizer), ("amp", session), *extra.items()):
        if target is not None and key not in content:
            raise CheckpointError(f"{path} has no {key!r}; it has {', '.join(sorted(content))}")
    # The optimizer first: loading its state lets masters follow the model's weights, which must still be the old ones
    # if something goes wrong.
    parts = [
        *(_paired("optimizer", optimizer, content["optimizer"], path) if optimizer is not None else ()),
        *(_paired("model", model, content["model"], path) if model is not None else ()),
        *([("session", session, content["amp"])] if session is not None else ()),
        *((key, target, content[key]) for key, target in extra.items()),
    ]
    for what, target, state in parts:
        if isinstance(target, Optimizer):
            _check_order(what, target, state, path)
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
        told = isinstance(error, PreampError) and not isinstance(error, OptimizerError)
        if told or not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{path} does not fit the {parts[begun - 1][0]} it is loaded into, so nothing was loaded: {error}"
        ) from error


def _check_order(what: str, optimizer: Optimizer, state: Any, path: Any) -> None:
    """`CheckpointError` for states that have the shapes of the optimizer's parameters in another order.

    torch loads them, as it loads a state of any shape, and the next step goes on with the moments of other parameters.
    """
    named: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    try:
        own = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for param, number in zip(own, numbers, strict=False):
            for name, value in state["state"].get(number, {}).items():
                if isinstance(value, Tensor) and is_sharded(value) == is_sharded(param):
                    named[name].append((tuple(param.shape), tuple(value.shape)))
    except (AttributeError, KeyError, TypeError):
        return  # no optimizer's state at all, as loading it will say
    for name, pairs in named.items():
        shapes, found = zip(*pairs, strict=True)
        if shapes != found and Counter(shapes) == Counter(found):
            shape, seen = next(pair for pair in pairs if pair[0] != pair[1])
            raise CheckpointError(
                f"{path} does not fit the {what}, and nothing was loaded: its {name!r} for a parameter of shape "
                f"{shape} has shape {seen}, which is another parameter's. Was the order of layers changed since it was "
                "saved? Give the optimizer its parameters in the order in which they were"
            )
