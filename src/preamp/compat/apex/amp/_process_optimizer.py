"""What `initialize` does to an optimizer: masters, a step that can be skipped, a state_dict that forgets nothing.

The optimizer steps masters, which have gradients of their own; loops of others know the model's.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....formats import LOW_DTYPES
from ....frameworks import replaced
from ....ledger import parameters_of
from .._masters import SAVED, Masters, clear_gradients, fitting, multiply_gradients
from .._notice import warn
from .._scaler import LossScaler
from ._amp_state import _amp_state, maybe_print
from ._gradient_versions import GradientVersions
from ._scaled_backward import Stash, add_pairwise, put_aside, put_back, unscale_and_add

ATTACHED: Any = weakref.WeakSet()
"""The states of all optimizers that have one, for `amp.close`; they live as long as their optimizers."""

_APEX_METHODS = {
    "_lazy_init_maybe_master_weights": "lazy_init",
    "_master_params_to_model_params": "masters_to_model",
    "_prepare_amp_backward": "prepare_backward",
    "_post_amp_backward": "post_backward",
    "_amp_lazy_init": "lazy_init",
}
"""Methods that scripts find on an optimizer with Apex."""

NO_CLOSURE = (
    "Currently, Amp does not support closure use with optimizers. A closure runs backward inside step(), where its "
    "gradients would still be scaled; call step() without one, after `with amp.scale_loss(...)`."
)

UNREAD = (
    "gradients of the model's 16-bit parameters were changed after amp.scale_loss, by clipping model.parameters(), by "
    "zeros written by hand or by a Reducer. That is without effect, as with NVIDIA's Apex: the step takes those of the "
    "float32 masters. Write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm), to clear gradients "
    "optimizer.zero_grad(), and reducer.reduce() inside the block of scale_loss"
)


class AmpOptimizerState(Masters):
    """`optimizer._amp_stash`. The masters are made when first needed, and then stand in the optimizer's groups.

    Without `master_weights` the optimizer steps the model's own parameters, and the flat lists have them by dtype.
    """

    def __init__(self, optimizer: Any, master_weights: bool) -> None:
        super().__init__()
        self._optimizer = optimizer
        self.master_weights = master_weights
        self.lazy_init_called = False
        self.all_fp32_params = self.all_fp32_from_fp32_params
        self._aside: Stash = []
        self.versions = GradientVersions()
        self.params_have_scaled_gradients = False
        self.delayed_scale = 1.0
        """The scale on the gradients while they stay scaled."""
        self.finish: Callable[[], None] | None = None
        """Ends the block of `amp.scale_loss` that the optimizer is in."""
        self.shared = set[int]()
        """Ids of parameters in that block whose gradients are unscaled with those of another optimizer."""
        self.already_patched = False
        """Whether the next step is skipped."""
        self._undo = ExitStack()
        self._reason = (0, 1.0)
        self._has_warned = False

    def lazy_init(self) -> None:
        """Make the masters, once; without masters look at the optimizer's parameters, which may be others by now."""
        groups = self._optimizer.param_groups
        if not self.master_weights:
            found = list(parameters_of(self._optimizer))
            self.all_fp16_params[:] = [p for p in found if p.dtype in LOW_DTYPES]
            self.all_fp32_from_fp32_params[:] = [p for p in found if p.dtype not in LOW_DTYPES]
        elif not self.lazy_init_called:
            for group in groups:
                self.make_masters(self._optimizer, group)
        self.take_unfrozen(self._optimizer)
        self.lazy_init_called = True

    def _stepped(self) -> list[Parameter]:
        """What the optimizer steps: parameters of the model, and masters, which a penalty may give gradients."""
        self.lazy_init()
        return [parameter for parameter in parameters_of(self._optimizer) if id(parameter) not in self.shared]

    # -- around a backward pass

    def prepare_backward(self) -> None:
        """Put gradients aside, and clear the model's 16-bit ones, which the masters have."""
        self._clear_low()
        self._aside = put_aside(self._stepped())

    def _clear_low(self) -> None:
        if self.master_weights:
            self.lazy_init()
            clear_gradients(self.all_fp16_params, True)
            self.versions.record(self.all_fp16_params)

    def post_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients, and add those from before; with masters the model's 16-bit ones stay scaled."""
        unscale_and_add(self._stepped(), self._aside, scaler)
        self._aside = []
        if self.master_weights:
            self._unscale_low(scaler)
            self.versions.record(self.all_fp16_params)

    def _unscale_low(self, scaler: LossScaler) -> None:
        """Unscale the model's gradients into the masters', added to what those hold."""
        both = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        pairs = [(p.grad, master) for p, master in both if p.grad is not None]
        true = [torch.empty_like(master) for _, master in pairs]
        scaler.unscale([g.coalesce().to_dense() if g.layout is torch.sparse_coo else g for g, _ in pairs], true)
        add_pairwise([(m.grad, t) for (_, m), t in zip(pairs, true, strict=True) if m.grad is not None])
        for (_, master), gradient in zip(pairs, true, strict=True):
            master.grad = gradient if master.grad is None else master.grad

    def abandon_backward(self) -> None:
        """The backward pass failed: its gradients are dropped, and those from before it are back."""
        self._clear_low()
        put_back(self._stepped(), self._aside)
        self._aside = []

    def check_gradients(self, stepping: bool = False) -> None:
        """Learn of gradients that were cleared by others; RuntimeError for such as no master has learnt of."""
        if self.master_weights and not self.params_have_scaled_gradients:
            self.lazy_init()
            changed = self.versions.update_masters(self.all_fp16_params, self.all_fp32_from_fp16_params, stepping)
            if changed:
                self.versions.record(self.all_fp16_params)
                if not self._has_warned:
                    warn(UNREAD)
                self._has_warned = True

    # -- gradients that stay scaled until a later pass (delay_unscale=True)

    def keep_scaled(self, scale: float) -> None:
        """The gradients of the pass to come stay scaled; those that are there, in true size, get that scale."""
        self._clear_low()  # the masters have them
        multiply_gradients(self._stepped(), scale)
        self.params_have_scaled_gradients, self.delayed_scale = True, scale

    def rescale(self, scale: float) -> None:
        """Give scaled gradients another scale: that of one of the losses may have moved, or each has its own."""
        if scale != self.delayed_scale:
            low = self.all_fp16_params if self.master_weights else []
            multiply_gradients([*low, *self._stepped()], scale / self.delayed_scale)
            self.delayed_scale = scale

    def check_unscaled(self) -> None:
        """RuntimeError for gradients that are still scaled."""
        if not self.params_have_scaled_gradients:
            return
        params = [*self.all_fp16_params, *parameters_of(self._optimizer)]
        if any(p.grad is not None and bool(p.grad.any()) for p in params):
            raise RuntimeError(
                f"step() while gradients carry the loss scale of {self.delayed_scale:g}: they come from "
                "amp.scale_loss(..., delay_unscale=True), which leaves them to the next pass. Write "
                "delay_unscale=False for the last backward pass before step()"
            )

    # -- skipped steps

    def skip_next(self, loss_id: int, scale: float) -> None:
        """Have the next step do nothing but say so; if that is settled already, leave the first reason."""
        if not self.already_patched:
            self.already_patched = True
            self._reason = (loss_id, scale)

    def skipped(self, closure: Any) -> None:
        """What a skipped step does."""
        self.already_patched = False
        if closure is not None:
            raise RuntimeError(NO_CLOSURE)
        loss_id, scale = self._reason
        maybe_print(f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to {scale}")
        clear_gradients(self.all_fp32_from_fp16_params, True)
        self.versions.record(self.all_fp16_params)

    # -- the optimizer's methods, which get what was there before as `inner`

    def step(self, inner: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Step the masters and round them into the model; where a gradient was not finite, say so instead."""
        if self.finish is not None:  # the gradients are still scaled
            self.finish()
        if self.already_patched:
            self._optimizer._opt_called = True  # schedulers are told: the step came first, it was only skipped
            return self.skipped(closure)
        if closure is None:
            self.check_unscaled()
            self.check_gradients(stepping=True)
        elif self.master_weights:
            raise RuntimeError(NO_CLOSURE)
        else:
            args = (closure, *args)
        handle = getattr(_amp_state, "handle", None)
        with nullcontext() if handle is None else handle._disable_casts():
            result = inner(*args, **kwargs)
        if handle is not None:
            handle._clear_cache()
        if self.master_weights:
            self.masters_to_model()
            clear_gradients(self.all_fp32_from_fp16_params, True)
        return result

    def zero_grad(self, inner: Any, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and inside of a block of `amp.scale_loss` those that were put aside, too."""
        self._aside = []
        (self._clear if self.master_weights else inner)(*args, **kwargs)

    def _clear(self, set_to_none: bool = False) -> None:
        """Clear the gradients of the model's parameters, to zeros or to None, and those of the masters to None."""
        self.lazy_init()
        clear_gradients((*self.all_fp16_params, *self.all_fp32_from_fp32_params), set_to_none)
        clear_gradients(self.all_fp32_from_fp16_params, True)
        self.versions.record(self.all_fp16_params)

    def add_param_group(self, inner: Any, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit parameters get masters at once."""
        self.lazy_init()
        before = len(self._optimizer.param_groups)
        inner(param_group)
        for group in self._optimizer.param_groups[before:]:
            self.make_masters(self._optimizer, group)

    def state_dict(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own, and in each group copies of the masters of its parameters, once there are any."""
        saved = inner(*args, **kwargs)
        if not self.all_fp32_from_fp16_params:
            return saved
        masters = [[None if m is None else m.detach().clone() for m in group] for group in self._masters_by_group()]
        if "param_groups" not in saved:  # a wrapper's own layout
            return {**saved, SAVED: masters}
        groups = [{**group, SAVED: own} for group, own in zip(saved["param_groups"], masters, strict=True)]
        return {**saved, "param_groups": groups}

    def load_state_dict(self, inner: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own; state stays in float32, and masters are taken if there are any."""
        self.lazy_init()
        groups = state_dict.get("param_groups", self._optimizer.param_groups)
        given = "param_groups" not in state_dict and state_dict.get(SAVED)  # in a wrapper's own layout
        given = given or [group.get(SAVED, [None] * len(group["params"])) for group in groups]
        pairs = fitting(chain.from_iterable(self._masters_by_group()), chain.from_iterable(given))
        result = inner(state_dict, *args, **kwargs)
        for group in self._optimizer.param_groups:
            group.pop(SAVED, None)
        for master, value in pairs:
            master.detach().copy_(value)
        self.masters_to_model()
        return result

    def _masters_by_group(self) -> list[list[Tensor | None]]:
        """In the order of the groups; None for parameters without a master."""
        known = set(map(id, self.all_fp32_from_fp16_params))
        return [[p if id(p) in known else None for p in group["params"]] for group in self._optimizer.param_groups]

    # -- attaching it

    def attach(self) -> None:
        """Put methods on the optimizer, bound ones, so that learning-rate schedulers may wrap them or be wrapped."""
        ATTACHED.add(self)
        for name, method in _APEX_METHODS.items():
            setattr(self._optimizer, name, getattr(self, method))
        self._replace("step")
        with_masters = ("add_param_group", "state_dict", "load_state_dict") if self.master_weights else ()
        for name in ("zero_grad", *with_masters):
            if hasattr(self._optimizer, name):  # a wrapper that is no torch.optim.Optimizer may lack it
                self._replace(name)

    def _replace(self, name: str) -> None:
        optimizer, before, method = self._optimizer, getattr(self._optimizer, name), getattr(self, name)

        @wraps(method)
        def function(_: Any, *args: Any, **kwargs: Any) -> Any:
            return method(before, *args, **kwargs)

        # torch's schedulers ask this of a step that they have wrapped; ours calls theirs, so the answer stays true
        if hasattr(before, "_wrapped_by_lr_sched"):
            function._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._undo.enter_context(replaced(optimizer, name, types.MethodType(function, optimizer)))

    def detach(self) -> None:
        """Take away from the optimizer what was put on it. Masters that were made stay in its groups."""
        ATTACHED.discard(self)
        self._undo.close()
        for name in (*_APEX_METHODS, "_amp_stash"):
            self._optimizer.__dict__.pop(name, None)


def _process_optimizer(optimizer: Any, properties: Any) -> Any:
    """Prepare an optimizer for `scale_loss`, in place. RuntimeError if that was done already."""
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "A given optimizer should only be passed through amp.initialize once. Keep the one it returned; "
            "amp.close() lets go of it."
        )
    for name in _APEX_METHODS:
        if hasattr(optimizer, name):
            raise RuntimeError(
                f"Incoming optimizer already has {name} defined, a name that amp needs for a method of its own."
            )
    optimizer._amp_stash = AmpOptimizerState(optimizer, bool(properties.master_weights))
    optimizer._amp_stash.attach()
    return optimizer
