"""Functions of torch's operators under the names of Apex's autograd functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


class OperatorFunction:
    """`apply` is the function itself, so that autocast, torch.compile, torch.func and second derivatives work.

    `forward` is there for those who look at its arguments, as Megatron does. `function`: what a subclass is made of.
    """

    apply: Any
    forward: Any

    def __init_subclass__(cls, function: Callable[..., Tensor]) -> None:
        def forward(ctx: Any, *arguments: Any, **options: Any) -> Tensor:
            """What `apply` returns; `ctx` is not used."""
            return function(*arguments, **options)

        signature = inspect.signature(function)
        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        told = signature.replace(parameters=[context, *signature.parameters.values()])
        forward.__signature__ = told  # type: ignore[attr-defined]
        cls.apply, cls.forward = staticmethod(function), staticmethod(forward)
