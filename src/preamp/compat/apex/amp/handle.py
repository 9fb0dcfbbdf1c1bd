"""The handle of O1's casts, and the context that scales a loss and unscales what backward makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._scaler import LossScaler
from ._amp_state import _amp_state
from ._process_optimizer import _process_optimizer
from ._scaled_backward import as_list, scaled_backward
from .wrap import Casts


@contextmanager
def scale_loss(
    loss: Any, optimizers: Any, loss_id: int = 0, model: Any = None, delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:  # fmt: skip
    """Yield the loss in float32 times its scale; afterwards the gradients of `optimizers` are true ones.

    `loss`: a tensor of any shape. `optimizers`: those whose parameters this loss has gradients for, one or a list.
    `loss_id`: which of the `num_losses` scales to use. `delay_unscale`: another backward pass follows before the step,
    leave gradients scaled until then. `delay_overflow_check`: unscale, but neither judge nor move the scale. `model` is
    accepted and not used.

    When a gradient is not finite, the scale is lowered and the next `step()` of each optimizer does nothing but say so.
    Raises RuntimeError before `amp.initialize`.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized. "
            "Call `model, optimizer = amp.initialize(model, optimizer, opt_level='O1')` before it."
        )
    chosen = as_list(optimizers)
    masters = _amp_state.opt_properties.master_weights or any(  # a later initialize, of another model, may have none
        getattr(getattr(each, "_amp_stash", None), "master_weights", False) for each in chosen
    )
    if not _amp_state.opt_properties.enabled and not masters:
        yield loss
        return
    scaler, _amp_state.loaded_unused = _amp_state.loss_scalers[loss_id], False
    if not masters and not scaler.dynamic and scaler.loss_scale() == 1.0:
        yield loss.float()
        return
    with scaled_backward(scaler, chosen, loss_id, delay_unscale, delay_overflow_check):
        yield loss.float() * scaler.loss_scale()


def disable_casts() -> AbstractContextManager[None]:
    """Have torch's functions compute in the dtypes they are given for a while; exceptions do not leave it so."""
    handle = getattr(_amp_state, "handle", None)
    return nullcontext() if handle is None else handle._disable_casts()


class AmpHandle(Casts):
    """What `init` returns: the casts, and the loss scaling of scripts of 2018.

    `loss_scale`: "dynamic" or a number. The other arguments are those of `Casts`.
    """

    def __init__(self, loss_scale: float | str = "dynamic", *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._default_scaler = LossScaler(loss_scale)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with a loss scale of its own for each of `num_loss` losses (API of 2018)."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> AbstractContextManager[Tensor]:
        """`amp.scale_loss` for scripts of 2018: one scale for all, no `initialize`.

        `optimizer`: one, or a list. Its `step` runs without casts, and does nothing once after an overflow.
        """
        return self._scaled(loss, self._default_scaler, as_list(optimizer), 0)

    @contextmanager
    def _scaled(self, loss: Tensor, scaler: LossScaler, optimizers: list[Any], loss_id: int) -> Iterator[Tensor]:
        """The loss times its scale, for optimizers that `initialize` need not have seen; itself without casts."""
        if not self.is_active():
            yield loss
            return
        for optimizer in optimizers:
            if not hasattr(optimizer, "_amp_stash"):
                _process_optimizer(optimizer, SimpleNamespace(master_weights=False))
        with scaled_backward(scaler, optimizers, loss_id):
            yield loss.float() * scaler.loss_scale()


class NoOpHandle(AmpHandle):
    """What `init(enabled=False)` returns: a handle that is never active, so that losses stay as they are."""

    def __init__(self) -> None:
        super().__init__(enable_caching=False, takes_cpu=False)
        self._is_active = False


class OptimWrapper:
    """An optimizer of 2018, together with the scales of the `num_loss` losses that are scaled, in turn, before a step.

    `scale_loss(loss)` once per loss, then `step()`, which does nothing once if any gradient was not finite and takes no
    closure. Everything else is the wrapped optimizer's.
    """

    def __init__(self, optimizer: Any, amp_handle: AmpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_idx = 0
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]

    @contextmanager
    def scale_loss(self, loss: Any) -> Iterator[Any]:
        """Yield the next loss times its scale; afterwards its gradients are unscaled and added to those before.

        IndexError for more losses between two steps than `num_loss` says.
        """
        index = self._loss_idx
        with self._amp_handle._scaled(loss, self._loss_scaler[index], [self._optimizer], index) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self) -> Any:
        """Step the optimizer, without casts; after an overflow say so instead."""
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer" or name.startswith("__"):  # while unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)
