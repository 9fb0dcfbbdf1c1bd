"""Before and after the backward pass of a scaled loss: only the gradients of that pass are unscaled and judged.

Gradients that were there before are put aside meanwhile, and added to the new ones once those are true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....errors import kind_of
from ....formats import LOW_DTYPES
from ....ledger import parameters_of
from .._scaler import LossScaler

Stash = list[tuple[Parameter, Tensor]]
"""Gradients put aside, with their parameters."""


def as_list(optimizers: Any) -> list[Any]:
    """One optimizer, or several in a list or tuple, as a list that has each of them once."""
    return list(dict.fromkeys(optimizers)) if isinstance(optimizers, (list, tuple)) else [optimizers]


@contextmanager
def scaled_backward(
    scaler: LossScaler, optimizers: Sequence[Any], loss_id: int, delay_unscale: bool = False, delay_check: bool = False
) -> Iterator[None]:
    """Around the backward pass of a scaled loss, for optimizers that `initialize` has seen.

    A step inside of the block ends it. When the body raises before, gradients that were put aside are put back, and the
    scale stays.
    """
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss was given {kind_of(optimizer)} that amp.initialize has not seen, so it knows "
                "neither its masters nor how to skip its step. Pass the optimizer that amp.initialize returned; one "
                "made anew (after a checkpoint, say) has to go through amp.initialize as well."
            )
    stashes = [optimizer._amp_stash for optimizer in optimizers]
    scale = scaler.loss_scale()
    for stash in stashes:  # all of them before any is changed
        if stash.finish is not None:
            raise RuntimeError(
                "amp.scale_loss inside a block of amp.scale_loss for the same optimizer: gradients would be divided by "
                "both scales. For two losses write two blocks, one after the other"
            )
        stash.check_gradients()
    seen = set[int]()
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        own = set(map(id, parameters_of(optimizer))) if len(optimizers) > 1 else set[int]()
        stash.shared, seen = own & seen, own | seen
        if stash.params_have_scaled_gradients:
            stash.rescale(scale)
        elif delay_unscale:
            stash.keep_scaled(scale)
        else:
            optimizer._prepare_amp_backward()
    is_open = True

    def finish(failed: bool = False) -> None:
        nonlocal is_open
        was_open, is_open = is_open, False
        for stash in stashes if was_open else ():
            stash.finish = None
            if failed and not delay_unscale:
                stash.abandon_backward()
        if failed or delay_unscale or not was_open:
            return
        scaler.clear_overflow_state()
        for optimizer, stash in zip(optimizers, stashes, strict=True):
            optimizer._post_amp_backward(scaler)
            stash.params_have_scaled_gradients = False
        if not delay_check and scaler.update_scale():
            for stash in stashes:
                stash.skip_next(loss_id, scaler.loss_scale())

    for stash in stashes:
        stash.finish = finish
    try:
        yield
    except BaseException:
        finish(failed=True)
        raise
    finish()


def put_aside(parameters: Sequence[Parameter]) -> Stash:
    """Take gradients away: backward then writes new ones instead of adding to them."""
    stash = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in stash:
        parameter.grad = None
    return stash


def put_back(parameters: Sequence[Parameter], stash: Stash) -> None:
    """Give gradients back, over whatever came since."""
    for parameter in parameters:
        parameter.grad = None
    for parameter, kept in stash:
        parameter.grad = kept


def unscale_and_add(parameters: Sequence[Parameter], stash: Stash, scaler: LossScaler) -> None:
    """Unscale gradients in place, and add what was put aside; only the new ones are judged."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.coalesce()
    fresh = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scaler.unscale(fresh, fresh, models_are_masters=True)
    dense: list[tuple[Tensor, Tensor]] = []
    for parameter, kept in stash:
        new = parameter.grad
        if new is None:
            parameter.grad = kept
        elif new.layout is kept.layout is torch.strided:
            dense.append((new, kept))
        else:
            parameter.grad = _sum(new, kept)
    add_pairwise(dense)


@torch.no_grad()
def add_pairwise(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the second of each pair to the first, in place."""
    if pairs:
        torch._foreach_add_([into for into, _ in pairs], [added for _, added in pairs])


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Of two gradients, one of them sparse at least; in float32, since torch adds no sparse tensors of 16 bits."""
    a, b = (x.float() if x.dtype in LOW_DTYPES else x for x in (one, other))
    total = (a + b).coalesce() if a.layout is b.layout else a.to_dense() + b.to_dense()
    return total.to(one.dtype)
