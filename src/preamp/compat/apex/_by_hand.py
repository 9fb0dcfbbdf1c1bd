"""Functions of torch's operators that have an autograd function's methods too.

`apply` is the function itself, so that autocast, torch.compile, torch.func and second derivatives work. `forward` and
`backward` are for those who look at their arguments, as Megatron does, or call them in a function of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ByHand:
    """`apply` is the function; what is kept between `forward` and `backward` are its inputs."""

    apply: Any

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of what `forward` was given: None for what has none, or is not there."""
        with torch.enable_grad():
            inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.function(*inputs, *ctx.rest)
        there = [x for x in inputs if x is not None]
        found = iter(torch.autograd.grad(out, there, grad_output.to(out.dtype)))
        return (*(None if x is None else next(found) for x in inputs), *(None for _ in ctx.rest))


def kept(ctx: Any, function: Any, inputs: tuple[Tensor | None, ...], *rest: Any) -> Tensor:
    """What a `forward` returns, with what its `backward` needs in `ctx`; `inputs`: floating, in front of the `rest`."""
    ctx.save_for_backward(*inputs)
    ctx.function, ctx.rest = function, rest
    with torch.no_grad():
        out: Tensor = function(*inputs, *rest)
    return out
