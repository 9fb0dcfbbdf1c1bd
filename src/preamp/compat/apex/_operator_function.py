"""Functions of torch's operators under the names of Apex's autograd functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def operator_function(name: str, function: Callable[..., Tensor]) -> type:
    """A class whose `apply` is the function itself, so that autocast, torch.compile and second derivatives work.

    `forward` is there for those who look at its arguments, as Megatron does.
    """

    def forward(ctx: Any, *arguments: Any, **options: Any) -> Tensor:
        """What `apply` returns; `ctx` is not used."""
        return function(*arguments, **options)

    signature = inspect.signature(function)
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    told = signature.replace(parameters=[context, *signature.parameters.values()])
    forward.__signature__ = told  # type: ignore[attr-defined]
    return type(name, (), {"apply": staticmethod(function), "forward": staticmethod(forward)})
