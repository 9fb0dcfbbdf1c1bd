"""Whether states of an optimizer are those of its parameters, asked before anything is loaded.

torch loads a state of any shape. A model whose layers were put into another order since it was saved so goes on with
the moments of other parameters, or a step fails when everything was loaded.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..errors import CheckpointError, OptimizerError
from ..optim import FusedOptimizer
from ..sharding import is_sharded

_LIKE_PARAMETERS = {
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum", "variance",
}  # fmt: skip
"""States of torch's optimizers that have a parameter's shape."""

_WITHOUT = {"row_var": -1, "col_var": -2}
"""Those of its Adafactor of which one dimension is 1."""


def check_states(what: str, optimizer: Any, state: Any, path: Any) -> None:
    """`CheckpointError` for a state_dict with states of other shapes than the parameters they are loaded for.

    What torch's own optimizers keep is known. Others may keep what they like, and are only refused states that are, all
    of them, in the shapes of the parameters, but not of their own ones: these were saved in another order. Whatever
    else is wrong with a state, the optimizer says as it loads it.
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
        pairs = found if known else _exchanged(found)
        for param, shape in pairs:
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


def _exchanged(found: list[tuple[Parameter, tuple[int, ...]]]) -> list[tuple[Parameter, tuple[int, ...]]]:
    """All, if the shapes are those of the parameters in another order; else none."""
    own = Counter(tuple(param.shape) for param, _ in found)
    return found if own == Counter(shape for _, shape in found) else []
