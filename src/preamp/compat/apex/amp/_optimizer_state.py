"""What amp keeps for each optimizer: its masters, the state of its gradients, whether the next step is skipped.

The optimizer steps masters, which have gradients of their own. Loops of others know the model's: they clear those to
give a step up, or write new ones by a backward pass without `scale_loss`. So amp notes which versions of the model's
16-bit gradients it has left there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....errors import PreampWarning
from ....formats import LOW_DTYPES
from .._masters import SAVED, Masters, multiply_gradients
from .._scaler import LossScaler
from ._amp_state import maybe_print
from ._scaled_backward import Stash, put_aside, put_back, unscale_and_add

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")
_SEEN = "_amp_seen_version"
"""A mark on a gradient: a reference would keep its memory where a script has set it to None."""


class GradientVersions:
    """The gradients of a list of parameters as amp left them."""

    def __init__(self) -> None:
        self._had: list[bool] = []

    def record(self, parameters: Sequence[Parameter]) -> None:
        """Note the gradients as they are now."""
        gradients = list(map(_GRAD, parameters))
        self._had = [gradient is not None for gradient in gradients]
        for gradient in gradients:
            if gradient is not None:
                gradient._amp_seen_version = gradient._version

    def forget(self) -> None:
        """No gradient is there that could be cleared."""
        self._had = []

    def accept(self, parameters: Sequence[Parameter]) -> None:
        """Take the gradients that amp has left for what they are now."""
        for gradient in map(_GRAD, parameters):
            if hasattr(gradient, _SEEN):
                gradient._amp_seen_version = gradient._version

    def update_masters(self, parameters: Sequence[Parameter], masters: Sequence[Parameter], stepping: bool) -> bool:
        """Clear the masters' gradients whose parameters' were cleared, by whichever call.

        Returns whether others were changed since amp left them, of which no master learns.

        `stepping`: the step comes next. Where all are None before it, somebody saves memory, and the masters' stay;
        otherwise the pass is given up. Zeros clear nothing then: clipping makes them of gradients whose norm is beyond
        float16. RuntimeError for gradients that came from a backward pass elsewhere.
        """
        gradients = list(map(_GRAD, parameters))
        with suppress(AttributeError):  # of one that is not there, or was never seen
            if list(map(attrgetter(_SEEN), gradients)) == list(map(_VERSION, gradients)):
                return False
        had = [*self._had, *[False] * (len(parameters) - len(self._had))]
        odd = [g for g in gradients if g is not None and getattr(g, _SEEN, None) != g._version]
        zeros = {id(gradient) for gradient in odd if not gradient.numel()} | _zeros(odd)
        gone = set() if stepping else zeros
        cleared = [(p, m) for p, m, h in zip(parameters, masters, had, strict=True) if h and _is_cleared(p, gone)]
        whole = bool(cleared) and len(cleared) == sum(had)
        if not (stepping and whole and all(parameter.grad is None for parameter, _ in cleared)):
            for parameter, master in cleared:
                if parameter.grad is None or master.grad is None:
                    master.grad = None
                else:
                    master.grad.zero_()
            if whole:
                for master in masters:
                    master.grad = None
        for parameter, gradient, master in zip(parameters, gradients, masters, strict=True):
            if gradient is None or id(gradient) in zeros or getattr(gradient, _SEEN, None) == gradient._version:
                continue
            if not hasattr(gradient, _SEEN) or master.grad is None:
                raise RuntimeError(
                    f"a gradient of a 16-bit parameter of shape {tuple(parameter.shape)} was written outside of "
                    "amp.scale_loss for this optimizer, which steps float32 masters that do not have it: it would be "
                    "lost. Write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()` for every "
                    "backward pass, with all optimizers that are to step for it; change gradients through "
                    "amp.master_params(optimizer); and clear what another loss left with optimizer.zero_grad()"
                )
        return any(
            h and g is not None and getattr(g, _SEEN, None) != g._version for g, h in zip(gradients, had, strict=True)
        )


def _is_cleared(parameter: Parameter, zeros: set[int]) -> bool:
    return parameter.grad is None or id(parameter.grad) in zeros


def _zeros(gradients: Sequence[Tensor]) -> set[int]:
    """Which gradients were zeroed. Waits for the device, if there are any to look at.

    None, if they are products with zero, which keep signs: clipping leaves them, and gives nothing up.
    """
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
    if not dense:
        return set()
    largest = torch.stack([norm.to(dense[0].device) for norm in torch._foreach_norm(dense, float("inf"))])
    zeros = [gradient for gradient, size in zip(dense, largest.tolist(), strict=True) if size == 0]
    return set() if any(bool(torch.signbit(each).any()) for each in zeros) else set(map(id, zeros))


NO_CLOSURE = (
    "Currently, Amp does not support closure use with optimizers. A closure runs backward inside step(), where its "
    "gradients would still be scaled; call step() without one, after `with amp.scale_loss(...)`."
)


UNREAD = (
    "gradients of the model's 16-bit parameters were changed between amp.scale_loss and optimizer.step(), by clipping "
    "model.parameters(), say. That is without effect, as with NVIDIA's Apex: the step takes those of the float32 "
    "masters. Write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)"
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
        self.all_fp32_from_fp32_grad_stash: Stash = []
        self.versions = GradientVersions()
        self.params_have_scaled_gradients = False
        self.delayed_scale = 1.0
        """The scale on the gradients while they stay scaled."""
        self.already_patched = False
        """Whether the next step is skipped."""
        self.without_casts: Any = None
        """The handle whose casts `step` runs without."""
        self.undo: list[Callable[[], None]] = []
        self._reason = (0, 1.0)
        self._told = False

    def lazy_init(self) -> None:
        """Make the masters, once; without masters look at the optimizer's parameters, which may be others by now."""
        groups = self._optimizer.param_groups
        if not self.master_weights:
            found = [p for group in groups for p in group["params"]]
            self.all_fp16_params[:] = [p for p in found if p.dtype in LOW_DTYPES]
            self.all_fp32_from_fp32_params[:] = [p for p in found if p.dtype not in LOW_DTYPES]
        elif not self.lazy_init_called:
            for group in groups:
                self.make_masters(self._optimizer, group)
        self.lazy_init_called = True

    def _stepped(self) -> list[Parameter]:
        """Those of the model's parameters that the optimizer steps itself: all that have no master."""
        self.lazy_init()
        if self.master_weights:
            return self.all_fp32_from_fp32_params
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    # -- around a backward pass

    def prepare_backward(self) -> None:
        """Put gradients aside, and clear the model's 16-bit ones, which the masters have."""
        self._clear_low()
        put_aside(self._stepped(), self.all_fp32_from_fp32_grad_stash)

    def _clear_low(self) -> None:
        if self.master_weights:
            self.lazy_init()
            for parameter in self.all_fp16_params:
                parameter.grad = None
            self.versions.forget()

    def post_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients, and add those from before; with masters the model's 16-bit ones stay scaled."""
        stepped = self._stepped()
        if self.master_weights:
            self._unscale_low(scaler)
        unscale_and_add(stepped, self.all_fp32_from_fp32_grad_stash, scaler)
        if self.master_weights:
            self.versions.record(self.all_fp16_params)

    def _unscale_low(self, scaler: LossScaler) -> None:
        """Unscale the model's gradients into the masters', added to what those hold."""
        fresh: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for parameter, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            given: Tensor | None = parameter.grad
            if given is None:
                continue
            given = given.coalesce().to_dense() if given.layout is torch.sparse_coo else given
            if master.grad is None:
                master.grad = torch.empty_like(master)
                fresh.append((given, master.grad))
            else:
                added.append((given, master.grad))
        scaler.unscale([g for g, _ in fresh], [m for _, m in fresh])
        totals = [m for _, m in added]
        scaler.unscale_with_stashed([g for g, _ in added], totals, totals)

    def abandon_backward(self) -> None:
        """The backward pass failed: its gradients are dropped, and those from before it are back."""
        self._clear_low()
        put_back(self._stepped(), self.all_fp32_from_fp32_grad_stash)

    def check_gradients(self, stepping: bool = False) -> None:
        """Learn of gradients that were cleared by others; RuntimeError for such as no master has learnt of."""
        if self.master_weights and not self.params_have_scaled_gradients:
            self.lazy_init()
            changed = self.versions.update_masters(self.all_fp16_params, self.all_fp32_from_fp16_params, stepping)
            if changed and stepping:
                self.versions.accept(self.all_fp16_params)
                if not self._told:
                    warnings.warn(UNREAD, PreampWarning, stacklevel=3)
                self._told = True

    def clear_master_gradients(self) -> None:
        """Make the gradients of all masters None."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

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
        params = [*self.all_fp16_params, *(p for group in self._optimizer.param_groups for p in group["params"])]
        if self.params_have_scaled_gradients and any(p.grad is not None and bool(p.grad.any()) for p in params):
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
        self.clear_master_gradients()
        self.versions.accept(self.all_fp16_params)

    # -- saving and loading

    def _masters_by_group(self) -> list[list[Tensor | None]]:
        """In the order of the groups; None for parameters without a master."""
        known = set(map(id, self.all_fp32_from_fp16_params))
        return [[p if id(p) in known else None for p in group["params"]] for group in self._optimizer.param_groups]

    def with_masters(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state_dict of the optimizer with copies of the masters in its groups, once there are any."""
        if not self.all_fp32_from_fp16_params:
            return state_dict
        groups = [
            {**group, SAVED: [None if master is None else master.detach().clone() for master in masters]}
            for group, masters in zip(state_dict["param_groups"], self._masters_by_group(), strict=True)
        ]
        return {**state_dict, "param_groups": groups}

    def check_masters(self, state_dict: dict[str, Any]) -> None:
        """ValueError if saved masters are not those of this optimizer's parameters."""
        groups = state_dict["param_groups"]
        if not any(SAVED in group for group in groups):
            return
        given = _shapes(group.get(SAVED, [None] * len(group["params"])) for group in groups)
        own = _shapes(self._masters_by_group())
        if own != given:
            own, given = ([*shapes, *[None] * (max(len(own), len(given)) - len(shapes))] for shapes in (own, given))
            odd = next(i for i, (mine, theirs) in enumerate(zip(own, given, strict=True)) if mine != theirs)
            raise ValueError(
                f"the saved master weights do not fit this optimizer: parameter {odd} has shape {given[odd]} in the "
                f"checkpoint and {own[odd]} here. Build model and optimizer as they were when it was saved, at the "
                "same opt_level."
            )

    @torch.no_grad()
    def load_masters(self) -> None:
        """Take the masters that the optimizer has loaded into its groups, and round them into the model."""
        for group, masters in zip(self._optimizer.param_groups, self._masters_by_group(), strict=True):
            for master, saved in zip(masters, group.pop(SAVED, ()), strict=False):
                if master is not None:
                    master.copy_(saved)
        self.masters_to_model()


def _shapes(groups: Iterable[Iterable[Tensor | None]]) -> list[tuple[int, ...] | None]:
    return [None if master is None else tuple(master.shape) for masters in groups for master in masters]
