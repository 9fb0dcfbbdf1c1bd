"""What makes optimizers of `preamp.optim` those of Apex: arguments, dtypes, and steps that are counted by group."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import required

from ....formats import LOW_DTYPES
from ....ledger import Bucket, Collected
from ....optim import FusedOptimizer
from .. import _amp_c

Closure = Callable[[], Any] | None
Group = dict[str, Any]

_NOT_HERE = {
    "amsgrad": "AMSGrad is preamp.optim.AdamW(..., amsgrad=True)",
    "wd_after_momentum": "write an optimizer whose weight decay is decoupled, such as FusedAdam",
    "adagrad_w_mode": "write an optimizer whose weight decay is decoupled, such as FusedAdam",
}
"""Options that are refused, and what to write instead."""


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


class ApexOptimizer(FusedOptimizer):
    """The differences from `preamp.optim`, to be put before one of its classes.

    Steps are counted in `param_group["step"]`, and not for each parameter. 16-bit parameters without masters have
    float32 states, and are stepped in float32 and rounded once. RuntimeError for options of Apex's that are not here.
    """

    counts_steps = False
    takes_masters = False
    counts_by_group: ClassVar[bool] = True
    on_device: bool = False
    """Whether learning rates and counts are tensors, so that a step can be captured, and skipped on the device."""
    set_grad_none = True
    multi_tensor_l2norm = staticmethod(_amp_c.multi_tensor_l2norm)

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        """The constructor. The attributes that are there by now are kept in copies and pickles."""
        asked = {"amsgrad": defaults.pop("amsgrad", False), **vars(self)}
        for name, instead in _NOT_HERE.items():
            if asked.get(name):
                raise RuntimeError(f"{type(self).__name__}({name}=True) is not here: {instead}, or {name}=False")
        self._own = tuple(vars(self))
        FusedOptimizer.__init__(self, params, defaults, master)

    @cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """What subclasses that step by themselves hand to `multi_tensor_applier` as `noop_flag_buffer`: int32, (1,)."""
        params = self.param_groups[0]["params"]
        return torch.zeros(1, dtype=torch.int32, device=params[0].device if params else None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients become None or zeros: as `set_to_none` says, else as `set_grad_none` of the constructor did."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def check_options(self, group: Group) -> None:
        """As in `preamp.optim`; a learning rate may be left to the groups."""
        if group["lr"] is not required:
            super().check_options(group)

    def add_param_group(self, param_group: Group) -> None:
        """As torch's; the group gets a count of its own."""
        super().add_param_group(param_group)
        self._complete_group(self.param_groups[-1])

    def _complete_group(self, group: Group) -> None:
        """Give a group its count, and learning rate and count the form in which steps have them."""
        device = group["params"][0].device if group["params"] else None
        if self.on_device:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        if self.counts_by_group:
            step = group.get("step", 0)
            as_tensor = torch.as_tensor(step, dtype=torch.int32, device=device).reshape(1).clone()
            group["step"] = as_tensor if self.on_device else int(step)

    # -- the step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether scalers leave gradients scaled, and have the step itself skip."""
        return self.on_device

    def state_dtype(self, name: str, param: Parameter) -> torch.dtype:
        """float32 for 16-bit parameters."""
        return torch.float32 if param.dtype in LOW_DTYPES else super().state_dtype(name, param)

    def _before_buckets(self, collected: Collected, factor: Tensor | None) -> None:
        """Count a step of each group; a count on the device leaves out steps that are skipped."""
        super()._before_buckets(collected, factor)
        found = getattr(self, "found_inf", None) if self._handed is None else self._handed[1]
        self._taken = [group.get("step", 0) for group in self.param_groups]
        for i, group in enumerate(self.param_groups if self.counts_by_group else ()):
            if self.on_device:
                self._taken[i] = group["step"].clone()
                taken: Any = 1 if found is None else (found.to(group["step"].device) <= 0).to(torch.int32)
                group["step"].add_(taken)  # in place, for captured graphs
            elif group["params"]:
                group["step"] += 1

    def _taken_before(self, group: Group, step: Any) -> Any:
        """How many steps the kernel is told that were taken before; None for one that does not ask."""
        return step

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        group, storage, device = bucket.group, bucket.storage, bucket.storage.params[0].device
        if bucket.leaves is None and storage.params[0].dtype in LOW_DTYPES:
            storage = replace(storage, params=[param.float() for param in storage.params], copies=storage.params)
        taken = self._taken_before(group, self._taken[bucket.number])
        if isinstance(taken, Tensor):
            storage = replace(storage, step=taken.reshape(()).to(device, torch.float32, copy=True))
        elif taken is not None:  # filled on the device, for which the host does not wait
            storage = replace(storage, step=torch.full((), taken, dtype=torch.float32, device=device))
        super()._advance(replace(bucket, storage=storage), gradients, **more)

    # -- saving and loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `preamp.optim`; nothing is shared with `state_dict`.

        Counts that torch's own optimizers do not save in their groups are those of their parameters.
        """
        super().load_state_dict(copy.deepcopy(state_dict))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            counts = [int(row["step"]) for p in group["params"] if "step" in (row := self.state.get(p, {}))]
            if counts and "step" not in saved:
                group["step"] = max(counts)
            self._complete_group(group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._own}, "_own": self._own}
