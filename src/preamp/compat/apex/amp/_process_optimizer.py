"""What `initialize` does to an optimizer: masters, a step that can be skipped, a state_dict that forgets nothing.

Methods are put on the optimizer as bound methods that call what was there before, so learning-rate schedulers may be
built before or after, and wrap or be wrapped.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....errors import kind_of
from ._amp_state import maybe_print
from ._masters import MastersOfOptimizer, PlainParameters

_METHODS = (
    "_lazy_init_maybe_master_weights",
    "_master_params_to_model_params",
    "_prepare_amp_backward",
    "_post_amp_backward",
    "_amp_lazy_init",
    "_abandon_amp_backward",
)


class AmpOptimizerState(MastersOfOptimizer):
    """`optimizer._amp_stash`: parameters by kind, gradients put aside, and whether the next step is skipped."""

    def __init__(self, optimizer: Any, master_weights: bool) -> None:
        super().__init__(optimizer)
        self.master_weights = master_weights
        self.params_have_scaled_gradients = False
        self.delayed_scale = 1.0
        """The scale that gradients carry while they rest scaled."""
        self.already_patched = False
        """Whether the next step is skipped."""
        self.without_casts: Any = None
        """The handle whose casts `step` runs without."""
        self.undo: list[Callable[[], None]] = []
        self._reason = (0, 1.0)
        self.kind: Any = self if master_weights else PlainParameters(self)

    def check_gradients(self, stepping: bool = False) -> None:
        """RuntimeError for gradients that no master has learnt of, where there are masters."""
        if self.master_weights and not self.params_have_scaled_gradients:
            self.follow_gradients(stepping)

    def rest_under(self, scale: float) -> None:
        """Bring gradients that rest scaled under another scale: one of the losses may have moved, or has its own."""
        if scale != self.delayed_scale:
            self.kind.rescale(scale / self.delayed_scale)
            self.delayed_scale = scale

    def begin_to_rest(self, scale: float) -> None:
        """The gradients of the pass to come rest scaled; those that are there are brought under its scale."""
        self.kind.bring_under(scale)
        self.params_have_scaled_gradients, self.delayed_scale = True, scale

    def check_unscaled(self) -> None:
        """RuntimeError for gradients that still rest scaled."""
        params = [*self.all_fp16_params, *(p for group in self._optimizer.param_groups for p in group["params"])]
        if self.params_have_scaled_gradients and any(p.grad is not None and bool(p.grad.any()) for p in params):
            raise RuntimeError(
                f"step() while gradients carry the loss scale of {self.delayed_scale:g}: they come from "
                "amp.scale_loss(..., delay_unscale=True), which leaves them to the next pass. Write "
                "delay_unscale=False for the last backward pass before step()"
            )

    def skip_next(self, loss_id: int, scale: float) -> None:
        """Have the next step do nothing but say so; if that is settled already, leave the first reason."""
        if not self.already_patched:
            self.already_patched = True
            self._reason = (loss_id, scale)

    def skipped(self, closure: Any) -> None:
        """What a skipped step does."""
        self.already_patched = False
        if closure is not None:
            raise RuntimeError(_NO_CLOSURE)
        loss_id, scale = self._reason
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scale}")
        for master in self.all_fp32_from_fp16_params:
            master.grad = None


_NO_CLOSURE = (
    "Currently, Amp does not support closure use with optimizers. A closure runs backward inside step(), where its "
    "gradients would still be scaled; call step() without one, after `with amp.scale_loss(...)`."
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
    kind = stash.kind
    optimizer._lazy_init_maybe_master_weights = optimizer._amp_lazy_init = kind.lazy_init
    optimizer._prepare_amp_backward = kind.prepare_backward
    optimizer._post_amp_backward = kind.post_backward
    optimizer._abandon_amp_backward = kind.abandon_backward
    optimizer._master_params_to_model_params = stash.masters_to_model
    _replace(optimizer, "step", _stepping(optimizer.step, stash))
    if stash.master_weights:
        _replace(optimizer, "zero_grad", _zeroing(stash))
        _replace(optimizer, "add_param_group", _adding(optimizer.add_param_group, stash))
        _replace(optimizer, "state_dict", _saving(optimizer.state_dict, stash))
        _replace(optimizer, "load_state_dict", _loading(optimizer.load_state_dict, stash))
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
                raise RuntimeError(_NO_CLOSURE)
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
            for master in stash.all_fp32_from_fp16_params:
                master.grad = None
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
        for master in stash.all_fp32_from_fp16_params:
            master.grad = None
        stash.shown.show(stash.all_fp16_params)

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
            stash.make_masters(group)

    return add_param_group


def _saving(inner: Any, stash: AmpOptimizerState) -> Any:
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own, and the masters by parameter number under "amp_master_params"."""
        saved = inner(*args, **kwargs)
        masters = stash.numbered_masters()
        return {**saved, "amp_master_params": masters} if masters else saved

    return state_dict


def _loading(inner: Any, stash: AmpOptimizerState) -> Any:
    def load_state_dict(self: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own; state stays in float32, and masters are taken if there are any."""
        stash.lazy_init()
        masters = state_dict.get("amp_master_params")
        stash.check_masters(masters)
        plain = {key: value for key, value in state_dict.items() if key != "amp_master_params"}
        result = inner(plain, *args, **kwargs)
        stash.load_masters(masters)
        return result

    return load_state_dict
