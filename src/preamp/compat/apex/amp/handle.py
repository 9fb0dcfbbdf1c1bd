"""The handle of O1's casts, and the context that scales a loss and unscales what backward makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._amp_state import _amp_state
from ._scaled_backward import as_list, scaled_backward
from .opt import OptimWrapper
from .scaler import LossScaler
from .utils import Caster, caster_to, verbosify


@contextmanager
def scale_loss(
    loss: Any,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Any]:
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
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    scaler = _amp_state.loss_scalers[loss_id]
    chosen = as_list(optimizers)
    handle = getattr(_amp_state, "handle", None)
    try:
        masters = _amp_state.opt_properties.master_weights
        if not masters and not scaler.dynamic and scaler.loss_scale() == 1.0:
            yield loss.float()
        else:
            with scaled_backward(scaler, chosen, loss_id, delay_unscale, delay_overflow_check):
                yield loss.float() * scaler.loss_scale()
    finally:
        if handle is not None:
            handle._clear_cache()  # what was cast in this iteration has had its backward pass


@contextmanager
def disable_casts() -> Iterator[None]:
    """Have torch's functions compute in the dtypes they are given for a while; exceptions do not leave it so."""
    handle = getattr(_amp_state, "handle", None)
    if handle is None:
        yield
        return
    with handle._disable_casts():
        yield


class AmpHandle:
    """Casts are patched into torch as long as it lives: until `_deactivate()`.

    `half_type`: float16, or bfloat16 at O4. `takes_cpu`: whether tensors on the CPU are cast too. They are where
    models are on the CPU; beside models on an accelerator, CPU tensors are data and keep their dtype.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        half_type: torch.dtype = torch.float16,
        takes_cpu: bool = True,
    ) -> None:
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[Tensor, Tensor] = {}
        self._stamps: dict[Tensor, tuple[int, int]] = {}
        self._default_scaler = LossScaler(loss_scale)
        self._is_active = True
        self._all_wrappers: list[OptimWrapper] = []
        self._saved: list[tuple[Any, str, bool, Any]] = []
        self.half_type = half_type
        self.takes_cpu = takes_cpu
        self._casters = {dtype: self.only(caster_to(dtype)) for dtype in (half_type, torch.float32, torch.float64)}

    def is_active(self) -> bool:
        """Whether functions cast now."""
        return self._is_active

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        before, self._is_active = self._is_active, False
        try:
            yield
        finally:
            self._is_active = before

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with a loss scale of its own for each of `num_loss` losses (API of 2018)."""
        self._default_scaler = None  # type: ignore[assignment]  # as it was: one way of scaling or the other
        wrapper = OptimWrapper(optimizer, self, num_loss)
        self._all_wrappers.append(wrapper)
        return wrapper

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """`amp.scale_loss` for scripts of 2018: one scale for all, no `initialize`.

        `optimizer`: one, or a list. Its `step` runs without casts, and does nothing once after an overflow.
        """
        if not self.is_active():
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError(
                "after handle.wrap_optimizer(), scale losses with the wrapped optimizer: "
                "`with optimizer.scale_loss(loss) as scaled_loss:`"
            )
        from ._process_optimizer import adopt

        chosen = as_list(optimizer)
        for each in chosen:
            adopt(each, self)
        try:
            with scaled_backward(self._default_scaler, chosen, 0):
                yield loss.float() * self._default_scaler.loss_scale()
        finally:
            self._clear_cache()

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is on a device where casts happen."""
        return self.takes_cpu or x.device.type != "cpu"

    def only(self, cast: Caster) -> Caster:
        """`cast`, of those tensors that casts are for."""
        if self.takes_cpu:
            return cast
        return lambda x: cast(x) if x.device.type != "cpu" else x

    def caster(self, dtype: torch.dtype) -> Caster:
        """A cast to `dtype` of those tensors that casts are for."""
        if dtype not in self._casters:
            self._casters[dtype] = self.only(caster_to(dtype))
        return self._casters[dtype]

    def low_caster(self, name: str) -> Caster:
        """A cast to 16 bits that keeps parameters' casts and tells of them if it is to."""
        told = verbosify(self.caster(self.half_type), name, self._verbose)
        return self.cached(told) if self.has_cache else told

    def cached(self, cast: Caster) -> Caster:
        """`cast`, made once for each float32 parameter until it is written, stepped, or `scale_loss` ends.

        Not kept where no gradient is recorded: such a copy would be found by the next training pass, without its
        gradient; and weights that are swapped for evaluation are written in ways that leave no trace.
        """
        cache, stamps = self._cache, self._stamps

        def kept(x: Tensor) -> Tensor:
            if x.dtype is not torch.float32 or not isinstance(x, Parameter):
                return cast(x)
            if not x.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return cast(x)
            stamp = (x._version, x.data_ptr())
            if stamps.get(x) == stamp:
                return cache[x]
            cache[x], stamps[x] = result, _ = cast(x), stamp
            return result

        return kept

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._stamps.clear()

    def _save_func(self, module: Any, name: str, function: Any = None) -> None:
        """Remember what is under a name; a name that `module` only inherits is taken away again."""
        own = name in vars(module)
        self._saved.append((module, name, own, vars(module)[name] if own else None))

    def _deactivate(self) -> None:
        """Put everything back under the names in torch where it was found. A second call does nothing."""
        for wrapper in self._all_wrappers:
            if wrapper._pending():
                warnings.warn("a wrapped optimizer had a skipped step coming when amp was deactivated", stacklevel=2)
        for module, name, own, function in reversed(self._saved):
            setattr(module, name, function) if own else delattr(module, name)
        self._saved.clear()
        self._all_wrappers.clear()
        self._clear_cache()
        self._is_active = False

    @property
    def has_cache(self) -> bool:
        """Whether casts of parameters are kept."""
        return self._enable_caching

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """Parameters and their casts."""
        return self._cache

    def remove_cache(self, param: Tensor) -> None:
        """Forget the cast of one parameter."""
        self._cache.pop(param, None)
        self._stamps.pop(param, None)

    @property
    def verbose(self) -> bool:
        """Whether every cast is printed."""
        return self._verbose


class NoOpHandle:
    """What `init(enabled=False)` returns: the same names, without effects."""

    def is_active(self) -> bool:
        """Never."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """A wrapper that leaves losses as they are."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextmanager
    def scale_loss(self, loss: Any, optimizer: Any) -> Iterator[Any]:
        """The loss itself."""
        yield loss

    @property
    def has_cache(self) -> bool:
        """Never."""
        return False

    @property
    def verbose(self) -> bool:
        """Never."""
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
