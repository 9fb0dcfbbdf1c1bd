"""What the fused optimizers share: torch's protocol, masters of 16-bit parameters, buckets, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..compiling import uncompiled
from ..errors import OptimizerError
from ..kernels import present_in, reciprocal
from ..ledger import Bucket, Buckets, Collected, Masters, Steps, gradients_of, parameters_of
from ..sharding import any_sharded
from ._loading import FLAGS, Loading


class FusedOptimizer(Loading):
    """A `torch.optim.Optimizer` that steps all its parameters in one pass, under a flag that stays on the device.

    16-bit parameters get float32 masters and float32 states (`master="float32"`), kept in its state under "master"
    unless a session lends its masters. bfloat16 ones may have split masters: only the 16 bits that the weight lacks are
    kept (`"split"`), or 8 of them (`"split24"`), under "master_bits". With `master=None` they are stepped in their own
    dtype, as torch would.
    Before a step, `found_inf` (0-d float32, above 0: skip) and `grad_scale` (gradients are divided by it) may be set as
    attributes: the protocol of torch.amp.GradScaler.
    """

    takes_masters = True
    """Tells a session and `preamp.GradScaler` that a step accepts 16-bit gradients, masters and a factor."""

    master_kinds: tuple[str | None, ...] = ("float32", None)
    """The values of `master`."""

    def __init__(self, params: Any, defaults: dict[str, Any], master: str | None) -> None:
        if master not in self.master_kinds:
            raise OptimizerError(
                f"{type(self).__name__} with master={master!r}: write {' or '.join(map(repr, self.master_kinds))}. "
                "'float32' keeps masters of 16-bit parameters, 'split' the same in less memory, 'split24' 24 bits of "
                "them, None keeps none"
            )
        if defaults.get("differentiable"):
            raise OptimizerError("a fused step cannot be differentiated through: use torch.optim for such a step")
        self.master = master
        self._prepare()
        super().__init__(params, {**defaults, "foreach": None, "differentiable": False, "fused": None})
        self.check_options({**self.defaults, "params": []})  # also where each group has its own

    def _prepare(self) -> None:
        self._buckets: dict[Parameter | None, Buckets] = {}
        self._handed: tuple[Tensor | None, Tensor | None, Collected | None] | None = None
        """What a session or a scaler passes to the step that follows: factor, flag, and lists of gradients."""
        self._masters = self._own_masters()
        self._lent = False
        self.counts: dict[Parameter, Steps] = {}
        """The step counts of each parameter."""
        self.unstarted: set[Parameter] = set()
        """Parameters whose state has not seen a step; kept by classes that need it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. `OptimizerError` for options with which it cannot step."""
        super().add_param_group(param_group)
        try:
            self.check_options(self.param_groups[-1])
        except OptimizerError:
            del self.param_groups[-1]
            raise

    # -- what a subclass defines

    def names_for(self, group: dict[str, Any], param: Parameter) -> tuple[str, ...]:
        """Name all states of one parameter: those of `state_names` unless it is an exception."""
        return self.state_names(group)

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make a state for the first step: zeros like the parameter."""
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    options: ClassVar[Any]
    """The class of the kernel's options; most of its fields are those of the parameter group."""
    kernel: ClassVar[Callable[..., None]]
    """What steps lists of tensors."""

    def _options(self, bucket: Bucket, **more: Any) -> Any:
        group = bucket.group
        own = {n: group[n] == True if n in FLAGS else group[n] for n in _names(self.options) if n in group}  # noqa: E712
        return self.options(**own, **more)  # torch's kernels refuse 1 for True

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        """Step the tensors of a bucket. `more`: options that are no group's, the factor of gradients and the flag."""
        self.kernel(bucket.storage, gradients, self._options(bucket, **more))

    def _before_buckets(self, collected: Collected, factor: Tensor | None) -> None:
        """Prepare a step that depends on all gradients, before the first bucket steps."""

    # -- stepping

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient, or none if `found_inf` says so.

        `closure`: evaluates the model again and returns the loss, as in torch. There is no host sync.
        """
        loss, enabled = None, torch.is_grad_enabled()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        torch._C._set_grad_enabled(False)  # a decorator, or a context, takes as long as collecting the gradients
        try:
            factor, found, collected = self._handed or self._flag_and_scale()
            on_cpu = found is not None and found.device.type == "cpu"
            if found is None or not on_cpu or found.item() == 0:
                collected = self.collect_anew() if collected is None or closure is not None else collected
                self._step_collected(collected, factor, None if on_cpu else found)
        finally:
            torch._C._set_grad_enabled(enabled)
        return loss

    def _flag_and_scale(self) -> tuple[Tensor | None, Tensor | None, None]:
        """What a scaler has set before the step."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        return None if scale is None else reciprocal(scale), getattr(self, "found_inf", None), None

    def _step_collected(self, collected: Collected, factor: Tensor | None, found: Tensor | None) -> None:
        with torch._C._DisableAutocast():  # in a region that is open still Muon would multiply as a model does
            self._before_buckets(collected, factor)
            for bucket, gradients in collected:
                bucket.begin_step(self._masters)
                self._advance(bucket, gradients, factor=factor, found=found)
                bucket.end_step(self._masters)

    @property
    def steps_alone(self) -> bool:
        """Whether the step of a parameter depends on no gradient but its own."""
        return type(self)._before_buckets is FusedOptimizer._before_buckets

    @torch.no_grad()
    def step_alone(self, param: Parameter, found: Tensor) -> None:
        """Step one parameter, unless `found` (0-d float32) is above 0, while gradients of others are to come.

        Its true gradient is taken as it is. Hooks of `step` are not called.
        """
        on_cpu = found.device.type == "cpu"
        if not on_cpu or found.item() == 0:
            self._step_collected(self.collect_anew(param), None, None if on_cpu else found)

    def step_with(
        self, *args: Any, factor: Tensor | None, found: Tensor | None, collected: Collected | None, **kwargs: Any
    ) -> float | None:
        """Call `step` with its wrappers and hooks, and with these arguments.

        `factor`: 0-d float32 that gradients are multiplied by. `found`: 0-d float32, above 0: skip. `collected`: the
        result of `collect`, unless hooks may have changed gradients since.
        """
        self._handed = factor, found, collected
        try:
            result: float | None = self.step(*args, **kwargs)
            return result
        finally:
            self._handed = None

    def collect(self) -> Collected | None:
        """Collect gradients in the lists of the step, to read them just before it.

        None if that saves nothing, or if the present buckets are out of date.
        """
        known = self._buckets.get(None)
        return known.collect(self) if known is not None and known.readable else None

    def collect_anew(self, alone: Parameter | None = None) -> Collected:
        """Collect gradients in the lists of the step, and make buckets anew that are out of date.

        `alone`: of this parameter only.
        """
        known = self._buckets.get(alone)
        found = None if known is None else known.collect(self)
        if found is None:
            known = self._buckets[alone] = self._bucketed(alone)
            found = known.collect(self)
            assert found is not None, "buckets that were made just now"
        return found

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, which fills all gradients by one call: one by one where DTensors and tensors are mixed."""
        if set_to_none:
            for param in parameters_of(self):
                param.grad = None
            return
        gradients = gradients_of(self)
        if not any_sharded(gradients):
            super().zero_grad(False)
            return
        for gradient in gradients:
            (gradient.detach_() if gradient.grad_fn is not None else gradient.requires_grad_(False)).zero_()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's way to run hooks around a step under a name for profilers, which is left out unless one runs.

        It takes as long as a step of a few small tensors. The hook of sessions, which changes nothing, still runs.
        """
        hooked, own = Optimizer.profile_hook_step(func), func is FusedOptimizer._own_step

        @uncompiled
        @wraps(func)
        def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            before = not self._step_supports_amp_scaling
            after = self._optimizer_step_post_hooks or _global_optimizer_post_hooks
            if before and self._handed is not None:
                self._handed = *self._handed[:2], None  # what hooks leave is to be collected anew
            if before or after or profiler._is_profiler_enabled:
                return hooked(self, *args, **kwargs)
            for hook in _global_optimizer_pre_hooks.values():
                hook(self, args, kwargs)
            return func(self, *args, **kwargs)

        if own:
            FusedOptimizer._steps.add(step)
        return step

    _own_step = step
    _steps: ClassVar[set[Any]] = set()
    """The `step` of classes that do not override it."""

    @property
    def is_hooked(self) -> bool:
        """Whether hooks run before a step, or the step was overridden: both may read and change gradients."""
        return not self._step_supports_amp_scaling

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step accepts scaled gradients, for scalers. Not if other code may read them: hooks of this
        optimizer, a `step` that a subclass overrides, or one that was put in its place.
        """
        for hook in (*self._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values()):
            if not getattr(hook, "changes_nothing", False):
                return False
        own = vars(self).get("step")
        if getattr(own, "__globals__", None) is vars(lr_scheduler):  # a scheduler's, which notes that it was called
            own = getattr(own, "__wrapped__", None)
        return (type(self).step if own is None else own) in self._steps

    def counted(self, params: list[Parameter], when: Steps | float) -> Steps:
        """New step counts for parameters, with views in their states. `when`: the steps they have seen."""
        if not isinstance(when, Steps) or not when.are_of(params):
            when = Steps(params, when.one if isinstance(when, Steps) else when)
            for param in params:
                self.counts[param], self.state[param]["step"] = when, when.of(param)
        return when

    @torch.inference_mode(False)  # states last
    def _bucketed(self, alone: Parameter | None) -> Buckets:
        params = [group["params"] for group in self.param_groups]
        if alone is not None:
            params = [[param for param in own if param is alone] for own in params]
        present = [present_in(own)[0] for own in params]
        for param in (param for params in present for param in params):
            self._check(param)
            mastered, known = self.is_mastered(param), param in self._masters
            kept = None if self._lent or known or not mastered else self.state[param].get(self._master_key)
            master = self._masters.stored(param) if mastered and known else param if kept is None else kept
            if master.shape != param.shape:
                raise OptimizerError(
                    f"a parameter has shape {tuple(param.shape)}, and its master {tuple(master.shape)}: it was "
                    "resized after its master was made. Make an optimizer, and prepare, of what it is now"
                )
            if mastered and not known:
                self._masters.adopt(f"{len(self._masters)}", param)
            if kept is not None:
                self._masters.take_over({param: kept})
        self.counts = {param: steps for param, steps in self.counts.items() if param in self.state}
        buckets = Buckets(self, present, self._masters, whole=alone is None)
        if not self._lent:
            for bucket in buckets.all:
                for param in bucket.params if bucket.leaves is not None else ():
                    self.state[param][self._master_key] = self._masters.stored(param)
        return buckets

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

    def lend(self, masters: Masters | None, given_back: Mapping[Parameter, Tensor] | None = None) -> None:
        """Step with the masters of a session, which takes over and saves those kept here; None gives them back."""
        stepped = [p for p in parameters_of(self) if p in self.state]
        kept = {p: self.state[p].pop(self._master_key) for p in stepped if self._master_key in self.state[p]}
        if masters is not None and not self._lent:
            masters.take_over({p: kept[p] for p in masters.among(kept)})
        self._masters, self._lent = (self._own_masters(), False) if masters is None else (masters, True)
        self._buckets.clear()
        for param in stepped:
            self._mend(param, self.state[param])  # to dtypes that a step needs now
        for param, master in (given_back or {}).items():
            if self.is_mastered(param):
                self.state[param][self._master_key] = master

    def leave_lost(self) -> None:
        """Let go of masters that a session has lent and, as its user has lost it, not taken back."""
        if self._lent:
            self.lend(None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_buckets" not in self.__dict__:  # unpickled, or copied
            self._prepare()
        self._buckets.clear()

    def __getstate__(self) -> dict[str, Any]:
        names = ("master", "rounding", "seed", "states")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in names if name in vars(self)}}


@cache
def _names(options: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(options))
