"""What `initialize` does to an optimizer: masters, a step that can be skipped, a state_dict that forgets nothing.

Methods are put on the optimizer as bound methods that call what was there before, so learning-rate schedulers may be
built before or after, and wrap or be wrapped.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from ....errors import kind_of
from .._masters import SAVED
from ._optimizer_state import NO_CLOSURE, AmpOptimizerState

_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
    "_abandon_amp_backward",
)


def _process_optimizer(optimizer: Any, properties: Any) -> Any:
    """Prepare an optimizer for `scale_loss`, in place. RuntimeError if that was done already."""
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "A given optimizer should only be passed through amp.initialize once. Keep the one it returned; "
            "amp.close() lets go of it."
        )
    for name in _METHODS:
        if hasattr(optimizer, name):
            raise RuntimeError(
                f"Incoming optimizer already has {name} defined, a name that amp needs for a method of its own."
            )
    stash = AmpOptimizerState(optimizer, bool(properties.master_weights))
    optimizer._amp_stash = stash
    optimizer._lazy_init_maybe_master_weights = optimizer._amp_lazy_init = stash.lazy_init
    optimizer._prepare_amp_backward = stash.prepare_backward
    optimizer._post_amp_backward = stash.post_backward
    optimizer._abandon_amp_backward = stash.abandon_backward
    optimizer._master_params_to_model_params = stash.masters_to_model
    _replace(optimizer, "step", _stepping(optimizer.step, stash))
    if stash.master_weights:
        _replace(optimizer, "zero_grad", _zeroing(stash))
        _replace(optimizer, "add_param_group", _adding(optimizer.add_param_group, stash))
        _replace(optimizer, "state_dict", _saving(optimizer.state_dict, stash))
        _replace(optimizer, "load_state_dict", _loading(optimizer.load_state_dict, stash))
    else:
        for group in optimizer.param_groups:  # of a state that was saved at O2
            group.pop(SAVED, None)
    return optimizer


def adopt(optimizer: Any, handle: Any) -> None:
    """The same for an optimizer that came to a handle's `scale_loss` without `initialize`; once."""
    if not hasattr(optimizer, "_amp_stash"):
        _process_optimizer(optimizer, types.SimpleNamespace(master_weights=False))
        optimizer._amp_stash.without_casts = handle


def release(optimizer: Any) -> None:
    """Take away from an optimizer what `_process_optimizer` put on it. Masters that were made stay in its groups."""
    for undo in reversed(optimizer._amp_stash.undo):
        undo()
    for name in (*_METHODS, "_amp_stash"):
        optimizer.__dict__.pop(name, None)


def _replace(optimizer: Any, name: str, function: Any) -> None:
    own = name in vars(optimizer)
    before = getattr(optimizer, name)
    # torch's schedulers ask this of a step that they have wrapped; ours calls theirs, so the answer stays true
    if hasattr(before, "_wrapped_by_lr_sched"):
        function._wrapped_by_lr_sched = True
    bound = types.MethodType(function, optimizer)
    setattr(optimizer, name, bound)

    def undo() -> None:
        if vars(optimizer).get(name) is not bound:
            return  # somebody wrapped it since; his wrapper goes on working
        setattr(optimizer, name, before) if own else delattr(optimizer, name)

    optimizer._amp_stash.undo.append(undo)


def _stepping(inner: Any, stash: AmpOptimizerState) -> Any:
    def step(self: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        if stash.already_patched:
            self._opt_called = True  # schedulers are told: the step came first, it was only skipped
            return stash.skipped(closure)
        if stash.params_have_scaled_gradients and closure is None:
            stash.check_unscaled()
        if stash.master_weights:
            if closure is not None:
                raise RuntimeError(NO_CLOSURE)
            stash.lazy_init()
            stash.check_gradients(stepping=True)
        if closure is not None:
            args = (closure, *args)
        handle = stash.without_casts
        if handle is None:
            result = inner(*args, **kwargs)
        else:
            with handle._disable_casts():
                result = inner(*args, **kwargs)
            handle._clear_cache()
        if stash.master_weights:
            stash.masters_to_model()
            stash.clear_master_gradients()
        return result

    return step


def _zeroing(stash: AmpOptimizerState) -> Any:
    def zero_grad(self: Any, set_to_none: bool = False) -> None:
        """Clear the gradients of the model's parameters, to zeros or to None, and those of the masters to None."""
        stash.lazy_init()
        kept: list[Tensor] = []
        for parameter in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
            if parameter.grad is not None:
                parameter.grad.detach_()
                if set_to_none or parameter.grad.layout is not torch.strided:
                    parameter.grad = None
                else:
                    kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)
        stash.clear_master_gradients()
        stash.versions.record(stash.all_fp16_params)

    return zero_grad


def _adding(inner: Any, stash: AmpOptimizerState) -> Any:
    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit parameters get masters at once."""
        stash.lazy_init()
        if not isinstance(param_group, dict):
            raise TypeError(f"a param group must be a dict, and this is {kind_of(param_group)}")
        if isinstance(param_group["params"], (set, frozenset)):
            raise TypeError("parameters must come in an order, as in a list: a set would change it from run to run")
        before = len(self.param_groups)
        inner(param_group)
        for group in self.param_groups[before:]:
            stash.make_masters(self, group)

    return add_param_group


def _saving(inner: Any, stash: AmpOptimizerState) -> Any:
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own, and in each group the masters of its parameters."""
        return stash.with_masters(inner(*args, **kwargs))

    return state_dict


def _loading(inner: Any, stash: AmpOptimizerState) -> Any:
    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own; state stays in float32, and masters are taken if there are any."""
        stash.lazy_init()
        stash.check_masters(state_dict)
        result = inner(state_dict, *args, **kwargs)
        stash.load_masters()
        return result

    return load_state_dict
