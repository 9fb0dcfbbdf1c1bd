"""The end of a session: torch, model and optimizer as they were before, with the values that training gave them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ledger import dtype_of_gradient


def restore(session: Any) -> None:
    """Undo what `prepare` and a `Session` have changed."""
    if (region := session._opened.pop(threading.get_ident(), None)) is not None:
        region.leave()
    torch.clear_autocast_cache()
    session._full.leave()
    session._order.close()
    if session._released is not None:
        session._released.close()
    true = _true_gradients(session)
    session._steps.close()
    session._reshard()
    for conversion in session._conversions:
        conversion.undo()
    kept = {p: session._masters.stored(p) for p in session._masters}
    dtypes = session._masters.restore()
    for parameter, gradient in true.items():
        parameter.grad = gradient.to(dtype_of_gradient(parameter))
    session._steps.take_states_back(kept, dtypes)
    session._release_kernels()
    session._rates.restore()


def _true_gradients(session: Any) -> dict[Parameter, Tensor]:
    """Make gradients that no step has used true, permanently, and drop scaled ones that a step has used.

    Returns those of low parameters, in float32.
    """
    session._gradients.rest()
    inverse = None
    if not session._gradients.carried:  # no backward pass has come to those
        inverse = session._losses.shared.inverse(session._gradients.device)
        if inverse is not None and not session._pending.running:
            for each in session._optimizers.values():
                each.zero_grad()
    true: dict[Parameter, Tensor] = session._gradients.true_for_good(inverse)
    return true
