"""Before and after the backward pass of a scaled loss, for optimizers that `initialize` has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ....errors import kind_of
from .scaler import LossScaler


def as_list(optimizers: Any) -> list[Any]:
    """One optimizer, or several in a list or tuple, as a list."""
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


@contextmanager
def scaled_backward(
    scaler: LossScaler,
    optimizers: Sequence[Any],
    loss_id: int,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[None]:
    """Around a backward pass: gradients that were there are put aside, the new ones unscaled and added to them.

    Putting them aside means that the new ones alone are unscaled and judged. When the body raises, what was put aside
    is put back and the scale stays.
    """
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                f"amp.scale_loss was given {kind_of(optimizer)} that amp.initialize has not seen, so it knows "
                "neither its masters nor how to skip its step. Pass the optimizer that amp.initialize returned; one "
                "made anew (after a checkpoint, say) has to go through amp.initialize as well."
            )
    scale = scaler.loss_scale()
    for optimizer in optimizers:  # all of them before any is changed
        optimizer._amp_stash.check_gradients()
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        if stash.params_have_scaled_gradients:
            stash.rest_under(scale)
        elif delay_unscale:
            stash.begin_to_rest(scale)
        else:
            optimizer._prepare_amp_backward()
    try:
        yield
    except BaseException:
        if not delay_unscale:
            for optimizer in optimizers:
                optimizer._abandon_amp_backward()
        raise
    if delay_unscale:
        return
    scaler.clear_overflow_state()
    for optimizer in optimizers:
        optimizer._post_amp_backward(scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
    if not delay_overflow_check and scaler.update_scale():
        for optimizer in optimizers:
            optimizer._amp_stash.skip_next(loss_id, scaler.loss_scale())
