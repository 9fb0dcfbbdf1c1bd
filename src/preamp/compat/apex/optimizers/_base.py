"""What the optimizers of this folder share: Apex's habits, float32 states, masters, saving and loading."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import required

from ....errors import OptimizerError
from ....formats import LOW_DTYPES
from ....kernels import Tensors, reciprocal
from ....ledger import Masters
from ....optim import float32_states
from .. import _amp_c, _steps

MASTER = "master_param"
"""The name of a parameter's float32 master in its state."""

Closure = Callable[[], Any] | None
Group = dict[str, Any]
Parameters = Sequence[Parameter]

_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum", "max_grad_norm", "step")


def constructor(*attributes: str, **defaults: Any) -> Callable[..., None]:
    """An `__init__` that takes `params` and these arguments: `attributes` stay with the optimizer, the others become
    options of its groups.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    taken = [inspect.Parameter(name, kind) for name in ("self", "params")]
    taken += [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    signature = inspect.Signature(taken)

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        self, params = options.pop("self"), options.pop("params")
        vars(self).update({name: options.pop(name) for name in attributes})
        self._begin(params, options)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


class ApexOptimizer(Optimizer):
    """A `torch.optim.Optimizer` that counts steps by group and takes parameters of several dtypes in one group.

    States of 16-bit parameters are float32, and stay so when they are loaded. What an optimizer does differently is in
    the attributes of its class, and in `step_group`.
    """

    kernel: ClassVar[Any]
    """The function of `preamp.kernels` that steps it."""
    options: ClassVar[Any]
    """The class of the kernel's options; fields that groups have are those of the groups."""
    state_names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    set_grad_none = True
    multi_tensor_l2norm = staticmethod(_amp_c.multi_tensor_l2norm)
    _masters: Masters

    def _begin(self, params: Any, defaults: dict[str, Any]) -> None:
        """The constructor. The attributes that are there by now are kept in copies and pickles.

        RuntimeError for `amsgrad=True`, `OptimizerError` for a negative number, or a beta outside [0, 1).
        """
        if defaults.pop("amsgrad", False):
            raise RuntimeError(
                f"{type(self).__name__} does not support the AMSGrad variant, and amsgrad=True asks for it: write "
                "amsgrad=False, or preamp.optim.AdamW(..., amsgrad=True)"
            )
        for name, value in defaults.items():
            if value is None or value is required or name not in _NOT_NEGATIVE:
                continue
            if not float(value) >= 0.0:
                raise OptimizerError(
                    f"{name}={value!r} would make steps go uphill or nowhere: write a number from 0 on"
                )
        for i, beta in enumerate(defaults.get("betas", ())):
            if not 0.0 <= float(beta) < 1.0:
                raise OptimizerError(f"betas[{i}]={beta!r} is no weight of a running mean: write a number in [0, 1)")
        self._own = tuple(vars(self))
        self._masters = Masters()
        super().__init__(params, defaults)

    @cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """What subclasses that step by themselves hand to `multi_tensor_applier` as `noop_flag_buffer`: int32, (1,)."""
        params = self.param_groups[0]["params"]
        return torch.zeros(1, dtype=torch.int32, device=params[0].device if params else None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients become None or zeros: as `set_to_none` says, else as `set_grad_none` of the constructor did."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    # -- the step

    @torch.no_grad()
    def step(self, closure: Closure = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        Scalers tell those that skip and unscale by themselves, in the attributes `grad_scale` and `found_inf`.
        """
        loss = evaluated(closure)
        scale = getattr(self, "grad_scale", None)
        self._advance(None if scale is None else reciprocal(scale.reshape(())), getattr(self, "found_inf", None))
        return loss

    def _advance(self, factor: Tensor | None = None, found: Tensor | None = None) -> None:
        """The step of all groups, by gradients times `factor`; no step if `found` is above 0."""
        everyone = [self.present(group) for group in self.param_groups]
        self.before_groups([gradient for _, gradients in everyone for gradient in gradients], factor)
        for group, (params, grads) in zip(self.param_groups, everyone, strict=True):
            if group["params"]:
                self.step_group(group, params, grads, factor=factor, found=found)

    def before_groups(self, gradients: Tensors, factor: Tensor | None) -> None:
        """Called with all gradients before the first group steps, for steps that depend on all."""

    def step_group(self, group: Group, params: Parameters, grads: Tensors, **more: Any) -> None:
        """The step of parameters of a group. `more`: other options of the kernel."""
        self.take(group, params, grads, step=self.count(group, more["found"]), **more)

    def take(
        self, group: Group, params: Parameters, grads: Tensors, *, step: int | Tensor | None, shrinks: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        """Have the kernel step parameters, by way of masters if they have some."""
        own = {field.name: group[field.name] for field in fields(self.options) if field.name in group}
        states = [self.states(params, name) if name else [] for name in self.state_names_of(group)]
        masters, options = self.masters(params), self.options(**{**own, **more})
        _steps.take(self.kernel, options, params, grads, states, step=step, masters=masters, shrinks=shrinks)
        self._masters.leaves_of(params).note()

    def state_names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states of a group's parameters; empty for one that it does without."""
        return self.state_names

    def present(self, group: dict[str, Any]) -> tuple[list[Parameter], list[Tensor]]:
        """Parameters of a group that have gradients, and these; RuntimeError for gradients that no kernel steps."""
        params = [param for param in group["params"] if param.grad is not None]
        gradients = [param.grad for param in params if param.grad is not None]
        for param, gradient in zip(params, gradients, strict=True):
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, and a parameter of shape "
                    f"{tuple(param.shape)} has one: step it with torch.optim.SparseAdam, or write sparse=False in its "
                    "embedding"
                )
            if not param.is_floating_point():
                raise RuntimeError(
                    f"{type(self).__name__} only supports real floating parameters; one is {param.dtype}: step it "
                    "with an optimizer of torch.optim"
                )
        return params, gradients

    def states(self, params: Sequence[Parameter], name: str) -> list[Tensor]:
        """A state of each parameter, zeros if there is none yet; float32 where the parameter is 16-bit."""
        found = []
        for param in params:
            own = self.state[param]
            if own.get(name) is None:
                dtype = torch.float32 if param.dtype in LOW_DTYPES else param.dtype
                own[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            found.append(own[name])
        return found

    def count(self, group: dict[str, Any], found: Tensor | None = None) -> Any:
        """Count a step of a group, and return its number; a count on the device leaves out steps that are skipped."""
        step = group.get("step", 0)
        if not isinstance(step, Tensor):
            group["step"] = number = int(step) + 1
            return number
        after = step + 1
        step.add_(1 if found is None else (found.to(step.device) <= 0).to(step.dtype))  # in place, for captured graphs
        return after

    # -- masters

    def wants_master(self, param: Tensor) -> bool:
        """Whether a parameter is stepped by way of a float32 master."""
        return False

    def masters(self, params: Sequence[Parameter]) -> list[Tensor | None]:
        """Masters, up to date with what was written into their parameters; None for parameters without."""
        wanting = [param for param in params if self.wants_master(param)]
        for param in wanting:
            if param not in self._masters:
                self._adopt(param)
        self._masters.refresh(self._masters.leaves_of(wanting))
        for param in wanting:
            self.state[param][MASTER] = self._masters.stored(param)
        return [self._masters.stored(param) if param in self._masters else None for param in params]

    def masters_by_group(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters as they lie in the groups; None where a parameter has none (yet)."""
        return [{"params": [self.state.get(p, {}).get(MASTER) for p in group["params"]]} for group in self.param_groups]

    def _adopt(self, param: Parameter) -> None:
        self._masters.adopt(f"{len(self._masters)}", param, self.state[param].get(MASTER))

    # -- saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but float32 states of 16-bit parameters stay float32, moments in 8 bits become float32, masters
        go into their parameters, and nothing is shared with `state_dict`. Options and counts that torch's own
        optimizers do not save in their groups are this one's, and those of their parameters.
        """
        before, state_dict = [dict(group) for group in self.param_groups], float32_states(state_dict)
        super().load_state_dict(state_dict)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(keys, params, strict=True):
            own = self.state.get(param, {})
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                    wide = name in (*self.state_names, MASTER) and param.dtype in LOW_DTYPES
                    dtype = torch.float32 if wide else own[name].dtype
                    own[name] = value.detach().to(own[name].device, dtype, copy=True)
            if own.get(MASTER) is not None and self.wants_master(param):
                with torch.no_grad():
                    param.copy_(own[MASTER])
                self._adopt(param)
        for group, own in zip(self.param_groups, before, strict=True):
            group.update({name: value for name, value in own.items() if name not in group and name != "step"})
            counts = [int(count) for p in group["params"] if (count := self.state.get(p, {}).get("step")) is not None]
            if counts and "step" not in group:
                group["step"] = max(counts)
            self.mend_group(group)

    def mend_group(self, group: dict[str, Any]) -> None:
        """Give a group that was loaded its count and tensors in the form in which steps have them."""
        if "step" in group:
            group["step"] = int(group["step"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own = tuple(state.keys() - {"defaults", "state", "param_groups"})
        self._masters = Masters()


def evaluated(closure: Closure) -> Any:
    """The loss of a closure, which needs gradients though the step does not; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
