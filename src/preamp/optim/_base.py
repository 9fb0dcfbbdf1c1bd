"""What the fused optimizers share: torch's protocol, masters of 16-bit parameters, the plan, saving and loading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import OptimizerError
from ..gradients import present_in, reciprocal
from ..masters import Masters
from ..multi_tensor import TensorList, count_writes
from ..sharding import any_sharded
from ._flat import Flat, ShapeMismatch
from ._loading import Loading
from ._plan import Bucket, Plan
from ._state import State
from ._steps import Steps

Lows = Sequence[Tensor | None] | None

MOVES = 8
"""How many plans may lay parameters somewhere else where nobody has asked for it."""


class FusedOptimizer(Loading):
    """A `torch.optim.Optimizer` that steps all its parameters in one pass, under a flag that stays on the device.

    16-bit parameters get float32 masters and float32 states (`master="float32"`), kept in its state under "master"
    unless a session lends its own; bfloat16 ones may have split masters (`"split"`): only the bits that the weight
    lacks are kept, under "master_bits". With `master=None` they are stepped in their own dtype, as torch would.
    Before a step, `found_inf` (0-d float32, above 0: skip), `grad_scale` (gradients are divided by it) and
    `grad_factor` (and multiplied by it) may be set as attributes: the protocol of torch.amp.GradScaler, and one more.
    """

    flat: bool | None = False
    """Whether small float32 parameters on a CPU are laid side by side (`Flat`); None: where nobody can tell, else only
    for the length of a step."""
    takes_masters = True
    """Tells a session and `preamp.GradScaler` that 16-bit gradients, masters and a factor may be handed over."""

    master_kinds: tuple[str | None, ...] = ("float32", None)
    """What `master` may be."""

    def __init__(self, params: Any, defaults: dict[str, Any], master: str | None) -> None:
        if master not in self.master_kinds:
            raise OptimizerError(
                f"{type(self).__name__} with master={master!r}: write {' or '.join(map(repr, self.master_kinds))}. "
                "'float32' keeps masters of 16-bit parameters, 'split' the same in less memory, None keeps none"
            )
        self.master = master
        self._prepare()
        super().__init__(params, {**defaults, "foreach": None, "differentiable": False, "fused": True})
        self.state = State(self.state)

    def _prepare(self) -> None:
        self._plan: Plan | None = None
        self._plans = 0
        self._masters = self._own_masters()
        self._lent = False
        self.counts: dict[Parameter, Steps] = {}
        """What counts the steps of each parameter."""
        self.unstarted: set[Parameter] = set()
        """Parameters whose state was made and has not seen a step; kept by those to whom it matters."""

    # -- what a kind of optimizer says

    counts_steps = True

    @abstractmethod
    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the states that have a parameter's shape."""

    def names_for(self, group: dict[str, Any], param: Parameter) -> tuple[str, ...]:
        """Names of all states of one parameter; those of `state_names` unless it is an exception."""
        return self.state_names(group)

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """A state before the first step: zeros like the parameter."""
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    @abstractmethod
    def _advance(
        self, bucket: Bucket, targets: list[Tensor], lows: Lows, grads: list[Tensor],
        factor: Tensor | None, found: Tensor | None,
    ) -> None:  # fmt: skip
        """Step the float32 `targets`, and write them rounded into `lows`."""

    def _advance_flat(
        self, bucket: Bucket, flat: Flat, grads: list[Tensor], factor: Tensor | None, found: Tensor | None
    ) -> None:
        """Step parameters that are laid side by side."""
        flat.take_in()
        self._advance(bucket, bucket.tensors(), None, grads, factor, found)
        flat.give_out()

    def _advance_split(
        self, bucket: Bucket, params: list[Tensor], bits: list[Tensor], grads: list[Tensor],
        factor: Tensor | None, found: Tensor | None,
    ) -> None:  # fmt: skip
        """Step bfloat16 `params` with the lower halves of their masters."""
        raise NotImplementedError(f"{type(self).__name__} has no split masters")

    def _survey(self, gathered: list[tuple[Bucket, list[Tensor]]], factor: Tensor | None) -> None:
        """A look at all gradients before the first bucket steps, for those whose step depends on all."""

    # -- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient, or none where `found_inf` says so.

        `closure`: evaluates the model again and returns the loss, as in torch. Nothing waits for the device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is not None and found.device.type == "cpu":
            if found.item() > 0:
                return loss
            found = None
        factor = self._factor()
        at_hand = getattr(self, "gradients_at_hand", None)
        if at_hand is not None and (closure is not None or self.is_hooked):
            at_hand = None
        gathered = self._gathered() if at_hand is None else at_hand
        self._survey(gathered, factor)
        for bucket, grads in gathered:
            params = bucket.tensors()
            if bucket.mastered and self._masters.split:
                bits = bucket.parts(self._masters.kept(bucket.params))
                self._advance_split(bucket, params, bits, grads, factor, found)
            elif bucket.mastered:
                where = params.addresses if isinstance(params, TensorList) and not bucket.sharded else None
                masters = bucket.parts(self._masters.followed(bucket.params, where))
                self._advance(bucket, masters, params, grads, factor, found)
                self._masters.published(bucket.params)
            elif bucket.flat is not None:
                self._advance_flat(bucket, bucket.flat, grads, factor, found)
            else:
                self._advance(bucket, params, self._masters.twins(bucket.params), grads, factor, found)
                self._masters.published(bucket.params)
            if bucket.steps is not None:
                bucket.steps.counted()
            if bucket.beside:  # so that their masters follow
                count_writes(bucket.beside)
        return loss

    def _gathered(self) -> list[tuple[Bucket, list[Tensor]]]:
        try:
            return [(bucket, bucket.laid(gradients)) for bucket, gradients in self.picked()]
        except ShapeMismatch:
            self._plan = None  # parameters were cut where they lie
            return [(bucket, bucket.laid(gradients)) for bucket, gradients in self.picked()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, which fills all gradients by one call: one by one where DTensors and tensors are mixed."""
        if set_to_none:
            super().zero_grad(True)
            return
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not any_sharded(gradients):
            super().zero_grad(False)
            return
        for gradient in gradients:
            (gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)).zero_()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's way to run hooks around a step under a name for profilers.

        That name takes as long as the rest of a step of a few small tensors. So it is left out where that would tell,
        unless a profiler runs; hooks that change nothing, of sessions, run all the same.
        """
        hooked, own = Optimizer.profile_hook_step(func), func is FusedOptimizer._own_step

        @wraps(func)
        def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            after = self._optimizer_step_post_hooks or _global_optimizer_post_hooks
            seen = self.is_hooked or after or profiler._is_profiler_enabled
            if seen or self._plan is None or not self._plan.at_hand:
                return hooked(self, *args, **kwargs)
            for hook in self._optimizer_step_pre_hooks.values():
                hook(self, args, kwargs)
            return func(self, *args, **kwargs)

        if own:
            FusedOptimizer._steps.add(step)
        return step

    _own_step = step
    _steps: ClassVar[set[Any]] = set()
    """What `step` is of classes that have not made one of their own."""

    @property
    def is_hooked(self) -> bool:
        """Whether hooks run before a step, or it is somebody's own: both may read and change gradients."""
        return bool(_global_optimizer_pre_hooks) or not self._step_supports_amp_scaling

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What scalers ask: whether a step may find its gradients scaled. Not if anybody else has to do with them:
        hooks of this optimizer, a step that a subclass has of its own, or one that was put in its place.
        """
        if not all(getattr(hook, "changes_nothing", False) for hook in self._optimizer_step_pre_hooks.values()):
            return False  # a session's own looks at nothing
        own = vars(self).get("step")
        if own is not None and getattr(own, "__globals__", None) is vars(
            lr_scheduler
        ):  # which notes that it was called
            own = getattr(own, "__wrapped__", None)
        return (type(self).step if own is None else own) in self._steps

    def picked(self) -> list[tuple[Bucket, list[Tensor]]]:
        """What a step would work on now: buckets of parameters, each with its gradients.

        Who has laid them already, bucket by bucket, may set that as `gradients_at_hand` for the length of a step.
        """
        present, gradients = zip(*(present_in(group["params"]) for group in self.param_groups), strict=True)
        found = None if self._plan is None else self._plan.picked(self, present, gradients)
        if found is None:
            self._plan = self._planned(present)
            found = self._plan.picked(self, present, gradients)
            assert found is not None, "a plan that was made just now"
        return found

    def at_hand(self) -> list[tuple[Bucket, list[Tensor]]] | None:
        """What `picked` gives, laid, for who looks at the gradients just before the step.

        None where that saves nothing, or what is planned so far does not fit them.
        """
        if self._plan is None or not self._plan.at_hand or self.is_hooked:
            return None
        present, gradients = zip(*(present_in(group["params"]) for group in self.param_groups), strict=True)
        found = self._plan.picked(self, present, gradients)
        if found is None:
            return None
        try:
            return [(bucket, bucket.laid(own)) for bucket, own in found]
        except ShapeMismatch:
            self._plan = None
            return None

    def counted(self, params: list[Parameter], when: Steps | float) -> Steps:
        """What counts the steps of parameters from now on, each shown in its state. `when`: how many they have seen."""
        if not isinstance(when, Steps) or not when.are_of(params):
            when = Steps(params, when.one if isinstance(when, Steps) else when)
            for param in params:
                self.counts[param], self.state[param]["step"] = when, when.of(param)
        return when

    def _factor(self) -> Tensor | None:
        factor: Tensor | None = getattr(self, "grad_factor", None)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            return factor
        return reciprocal(scale) if factor is None else reciprocal(scale) * factor

    @torch.inference_mode(False)  # states last, and parameters may be laid elsewhere
    def _planned(self, present: Sequence[list[Parameter]]) -> Plan:
        for params in present:
            for param in params:
                self._check(param)
                if not self._lent and self.is_mastered(param) and param not in self._masters:
                    kept = self.state[param].get(self._master_key)
                    self._masters.adopt(f"{len(self._masters)}", param, kept)
                master = self._masters.of(param) if self.is_mastered(param) else param
                if master.shape != param.shape:
                    raise OptimizerError(
                        f"a parameter has shape {tuple(param.shape)}, and its master {tuple(master.shape)}: it was "
                        "resized after its master was made. Make an optimizer, and prepare, of what it is now"
                    )
        self.counts = {param: steps for param, steps in self.counts.items() if param in self.state}
        plan = Plan(self, present)
        self._plans += 1
        if not self._lent:
            for bucket in plan.buckets:
                for param in bucket.params if bucket.mastered else ():
                    self.state[param][self._master_key] = self._masters.of(param)
        return plan

    @property
    def lays_flat(self) -> bool | None:
        """`flat`, but never where each parameter has a copy that is written too."""
        return False if self._masters.shadows else self.flat

    @property
    def may_move(self) -> bool:
        """Whether parameters may still be laid somewhere else unasked.

        Not for ever: each time they are, those that have no gradient just then stay where they were, and all of that
        memory with them; two optimizers of the same parameters would take these from each other at every step.
        """
        return self._plans < MOVES

    def may_swap(self, param: Parameter) -> bool:
        """Whether a session may swap a parameter's master in, so that it is 16-bit in some steps and not in others."""
        return self._lent and not self._masters.shadows and param in self._masters

    def _check(self, param: Parameter) -> None:
        grad = param.grad
        if grad is not None and grad.layout is not torch.strided:
            raise OptimizerError(
                f"{type(self).__name__} got a sparse gradient of shape {tuple(grad.shape)} and steps dense ones: use "
                "torch.optim.SparseAdam or SGD for such parameters, or sparse=False in the embedding"
            )
        if grad is not None and grad.device != param.device:
            raise OptimizerError(
                f"a gradient lies on {grad.device}, and its parameter on {param.device}: the parameter was moved after "
                "the backward pass. Move it before, or run backward again"
            )
        if grad is not None and grad.shape != param.shape:
            raise OptimizerError(
                f"a gradient has shape {tuple(grad.shape)}, and its parameter {tuple(param.shape)}: the parameter was "
                "resized after the backward pass. Resize it after zero_grad(), or run backward again"
            )
        if not param.is_floating_point():
            raise OptimizerError(f"{type(self).__name__} steps real floating parameters; one is {param.dtype}")

    # -- masters

    def lend(self, masters: Masters | None) -> None:
        """Step with the masters of a session, which saves them itself; None gives them back."""
        self._masters, self._lent = (self._own_masters(), False) if masters is None else (masters, True)
        self._plan = None
        for state in self.state.values():
            state.pop(self._master_key, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master": self.master, "flat": self.flat}


def check_hyper(name: str, value: Any, *, low: float = 0.0, high: float = float("inf")) -> None:
    """`OptimizerError` unless a number lies in [low, high)."""
    number = float(value) if not isinstance(value, Tensor) or value.numel() == 1 else float("nan")
    if not low <= number < high:
        raise OptimizerError(f"{name}={value!r} must lie in [{low:g}, {high:g})")


def refuse_differentiable(differentiable: bool) -> None:
    """`OptimizerError` for `differentiable=True`."""
    if differentiable:
        raise OptimizerError("a fused step cannot be differentiated through: use torch.optim with differentiable=True")
