"""Functions of torch's operators that have an autograd function's methods too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OperatorFunction:
    """`apply` is the function itself, so that autocast, torch.compile, torch.func and second derivatives work.

    `forward` and `backward` are for those who look at their arguments, as Megatron does, or call them in a function of
    their own. `function`: what a subclass is made of, and `tensors`: how many of its arguments, the first ones, are
    floating tensors or None; they are what is kept between the two.
    """

    apply: Any
    forward: Any

    def __init_subclass__(cls, function: Callable[..., Tensor], tensors: int) -> None:
        signature = inspect.signature(function)

        def forward(ctx: Any, *arguments: Any, **options: Any) -> Tensor:
            """What `apply` returns; `ctx` as in a torch.autograd.Function."""
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            inputs = bound.args[:tensors]
            ctx.function, ctx.rest = function, bound.args[tensors:]
            ctx.save_for_backward(*inputs)
            with torch.no_grad():
                return function(*inputs, *ctx.rest)

        context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        told = signature.replace(parameters=[context, *signature.parameters.values()])
        forward.__signature__ = told  # type: ignore[attr-defined]
        cls.apply, cls.forward = staticmethod(function), staticmethod(forward)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what `forward` was given: None for what has none, or is not there."""
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.function(*inputs, *ctx.rest)
        there = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(out, there, grad_output.to(out.dtype)))
        return (*(None if x is None else next(found) for x in inputs), *(None for _ in ctx.rest))
