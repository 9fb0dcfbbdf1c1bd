"""The parameters of an optimizer, their gradients and states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..ledger import Masters

_PARAMS = itemgetter("params")


def parameters_of(optimizer: Optimizer) -> Iterator[Parameter]:
    """Every parameter in an optimizer's groups."""
    return chain.from_iterable(map(_PARAMS, optimizer.param_groups))


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's parameters have now."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def dtype_of_gradient(parameter: Parameter) -> torch.dtype:
    """What dtype a parameter's gradient has; since torch 2.10 it may be another than the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def low_strangers(optimizer: Optimizer, masters: Masters) -> list[Parameter]:
    """16-bit parameters that were added to an optimizer after the session began, and have no master yet."""
    return masters.strangers(list(parameters_of(optimizer)))


def state_like_parameters(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to the dtype that its parameters have now, where it has their shape."""
    inner = getattr(optimizer, "optim", None)  # by which a ZeroRedundancyOptimizer steps its part
    if isinstance(inner, Optimizer):
        state_like_parameters(inner)
    castable = (torch.float16, torch.bfloat16, torch.float32)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            fits = isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in castable
            if fits and parameter.dtype in castable and value.dtype is not parameter.dtype:
                state[key] = value.to(parameter.dtype)
