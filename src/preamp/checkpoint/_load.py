"""Loading: all objects or none; and a check that an optimizer's states belong to its parameters.

torch loads a state of any shape. A model whose layers were reordered since it was saved would then go on with the
moments of other parameters, or fail at a step after everything was loaded. So shapes are checked before.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import CheckpointError, OptimizerError, PreampError, kind_of
from ..optim import FusedOptimizer
from ..session import Session
from ..sharding import is_sharded
from ._content import AnyPath, Models, Optimizers, kept_on_host
from ._file import read
from ._save import writer


def load(
    path: AnyPath, *, model: Models | None = None, optimizer: Optimizers | None = None, session: Session | None = None,
    map_location: Any = "cpu", **extra: Any,
) -> dict[str, Any]:  # fmt: skip
    """Read a checkpoint, load what is named into the objects given, and return the whole content.

    All or nothing: if one object does not accept its state, those before it get back what they had; for that, copies
    of their states are kept in host memory during the call. Waits for a `save_async` to the same path. `extra`: further
    objects, by the names they were saved under, with `state_dict` and `load_state_dict` (an LR scheduler); None is left
    out.

    Raises `CheckpointError` for a file that is not one, is damaged, lacks what an object needs or does not fit it;
    `StateError` when it does not fit the session; `FileNotFoundError` when there is none.
    """
    writer().finish(path)
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


_LIKE_PARAMETERS = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum", "variance",
}  # fmt: skip
"""States of torch's optimizers that have a parameter's shape."""

_WITHOUT = {"row_var": -1, "col_var": -2}
"""Those of its Adafactor of which one dimension is 1."""


def check_states(what: str, optimizer: Any, state: Any, path: Any) -> None:
    """`CheckpointError` for a state_dict with states of other shapes than the parameters they are loaded for.

    The states of torch's own optimizers are known. Those of others are refused only if all of them have shapes of
    parameters, but in another order. The optimizer itself reports whatever else is wrong with a state.
    """
    if isinstance(optimizer, FusedOptimizer):
        try:
            optimizer.check_loadable(state)
        except OptimizerError as error:
            raise CheckpointError(f"{path} does not fit the {what}, and nothing was loaded: {error}") from error
        except (AttributeError, KeyError, TypeError):
            pass  # no optimizer's state at all
        return
    known = inspect.unwrap(getattr(type(optimizer), "step", len)).__module__.startswith("torch.optim.")
    named: dict[str, list[tuple[Parameter, tuple[int, ...]]]] = defaultdict(list)
    for param, saved in _pairs(optimizer, state):
        for name, value in saved.items():
            if isinstance(value, Tensor) and is_sharded(value) == is_sharded(param):
                named[name].append((param, tuple(value.shape)))
    for name, found in named.items():
        if not known:  # only the shapes of the parameters, in another order, are refused
            shapes = Counter(shape for _, shape in found)
            found = found if shapes == Counter(tuple(param.shape) for param, _ in found) else []
        for param, shape in found:
            wanted = _wanted(name, tuple(param.shape)) if known else tuple(param.shape)
            if wanted is not None and shape != wanted:
                raise CheckpointError(
                    f"{path} does not fit the {what}, and nothing was loaded: its {name!r} for a parameter of shape "
                    f"{tuple(param.shape)} has shape {shape}, which is another parameter's. Was the order of layers "
                    "changed since it was saved? Give the optimizer its parameters in the order in which they were"
                )


def _pairs(optimizer: Any, state: Any) -> Iterator[tuple[Parameter, Mapping[str, Any]]]:
    """Each parameter with what was saved for the one in its place; nothing where the state is no optimizer's."""
    try:
        own = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        states = state["state"]
        for param, number in zip(own, numbers, strict=False):
            saved = states.get(number)
            if isinstance(saved, Mapping):
                yield param, saved
    except (AttributeError, KeyError, TypeError):
        return


def _wanted(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if name in _LIKE_PARAMETERS:
        return shape
    if name in _WITHOUT and len(shape) > 1:
        place = len(shape) + _WITHOUT[name]
        return (*shape[:place], 1, *shape[place + 1 :])
    return None
