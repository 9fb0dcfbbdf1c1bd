"""FusedAdam, FusedAdam as it was in 2018, and the operators of 2018 that toolkits call through `fused_adam_cuda`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import kernels
from ....ledger import Bucket
from ....optim import Adam
from .. import _amp_c
from ._base import ApexOptimizer, Closure, Group, constructor

OF_2018 = frozenset(("amp_scale_adjustment", "eps_inside_sqrt", "max_grad_norm", "use_mt"))


class FusedAdam(ApexOptimizer, Adam):
    """Adam (Kingma and Ba 2015), or by default AdamW (Loshchilov and Hutter 2019), with Apex's arguments.

    `adam_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters: float32, float16,
    bfloat16 or float64, mixed in a group as they come; 16-bit ones have float32 moments and are stepped in float32.
    `master_weights`: they also keep a float32 master, in the state under "master". `capturable`: learning rate
    and step count are tensors, and a `GradScaler`'s flag and scale are read on the device, so that a step can be
    captured in a CUDA graph. The step counter is `param_group["step"]`; moments are "exp_avg" and "exp_avg_sq".
    Raises RuntimeError for `amsgrad=True`, ValueError for sparse gradients and hyper-parameters out of range.
    """

    states = "float32"
    multi_tensor_adam = staticmethod(_amp_c.multi_tensor_adam)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """With arguments of 2018, the optimizer of 2018, which was imported from this place then."""
        if cls is FusedAdam and not OF_2018.isdisjoint(kwargs):
            return super().__new__(FusedAdam2018)
        return super().__new__(cls)

    adam_w_mode: bool
    capturable: bool
    master_weights: bool

    __init__ = constructor(
        "adam_w_mode", "set_grad_none", "capturable", "master_weights",
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0, amsgrad=False,
        set_grad_none=True, capturable=False, master_weights=False,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        # lists of masters were passed, too; their values are the model's
        self.master_weights, self.on_device = bool(self.master_weights), self.capturable
        super()._begin(params, defaults, "float32" if self.master_weights else None)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]] | None:
        """The masters as they lie in the groups, None for parameters without one; or None without `master_weights`."""
        if not self.master_weights:
            return None
        return [{"params": [self.state.get(p, {}).get("master") for p in g["params"]]} for g in self.param_groups]

    def state_names(self, group: Group) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def _taken_before(self, group: Group, step: Any) -> Any:
        return step if group["bias_correction"] else _amp_c.LATE

    def _options(self, bucket: Bucket, **more: Any) -> Any:
        return replace(super()._options(bucket, **more), decoupled_weight_decay=bool(self.adam_w_mode))


FusedAdam.__new__.__signature__ = inspect.signature(FusedAdam.__init__)


class FusedAdam2018(FusedAdam):
    """AdamW with the arguments, the clipping and the bias correction of Apex's FusedAdam of 2018.

    Bias corrections multiply the learning rate, so that `eps` and weight decay are not corrected. `max_grad_norm`:
    the gradients of each group are clipped to this global norm in the step; 0: they are not. `use_mt` and
    `amp_scale_adjustment` are accepted and make no difference. RuntimeError for `eps_inside_sqrt=True`; the rest is as
    in `FusedAdam`, which makes this one where it gets its arguments.

    `step` takes `grads`: gradients in the place of `.grad`, of any floating dtype; `output_params`: tensors that the
    stepped parameters are written to as well. Each is a list of lists by group, or for one group a list. `scale`: what
    gradients are to be divided by. `grad_norms` is accepted: norms are computed here. ValueError where there are not as
    many gradients as parameters; write None for parameters without one.
    """

    __init__ = constructor(
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, weight_decay=0.0,
        max_grad_norm=0.0, amsgrad=False, use_mt=False, amp_scale_adjustment=1.0,
    )  # fmt: skip
    adam_w_mode, capturable, master_weights = True, False, False

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        del defaults["use_mt"], defaults["amp_scale_adjustment"]
        if defaults.pop("eps_inside_sqrt"):
            raise RuntimeError(
                f"FusedAdam(eps_inside_sqrt=True) is not here: write FusedAdam(eps={math.sqrt(defaults['eps']):g}), "
                "which is added to the root and has the same effect on an entry whose gradients are 0"
            )
        super()._begin(params, defaults, master)

    @torch.no_grad()
    def step(
        self, closure: Closure = None, grads: Any = None, output_params: Any = None, scale: Any = None,
        grad_norms: Any = None,
    ) -> Any:  # fmt: skip
        """One step; the class says by what. Returns the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        groups = self.param_groups
        each = zip(groups, _by_group(grads, groups), _by_group(output_params, groups), strict=True)
        for group, given, outs in each:
            gradients = [p.grad for p in group["params"]] if given is None else given
            there = [(p, g) for p, g in zip(group["params"], gradients, strict=True) if g is not None]
            if there:
                self._step(group, [p for p, _ in there], [g for _, g in there], scale)
            if outs is not None:
                torch._foreach_copy_(outs, [p.detach() for p in group["params"]])
        return loss

    def _step(self, group: Group, params: list[Any], grads: list[Tensor], scale: Any) -> None:
        states: list[list[Tensor]] = [[], []]
        for p in params:
            self._check(p)
            for name, state in zip(self.kept, states, strict=False):
                if name not in self.state[p]:
                    self.state[p][name] = self.new_state(name, group, p, self.state_dtype(name, p))
                state.append(self.state[p][name])
        group["step"] += 1
        factor = torch.full((), 1.0 if scale is None else 1.0 / scale, dtype=torch.float32, device=params[0].device)
        limit = group["max_grad_norm"]
        if limit > 0:
            norm = kernels.global_norm(grads, device=factor.device)
            factor = factor / ((norm * factor + 1e-6) / limit).clamp(min=1.0)
        step_lists(
            params, grads, states, factor, group["lr"], group["betas"], group["eps"], group["step"],
            group["bias_correction"], group["weight_decay"],
        )  # fmt: skip


def _by_group(given: Any, groups: Sequence[Any]) -> list[Any]:
    """Tensors by group, from a list of lists, or for one group from a list or another iterable."""
    if given is None:
        return [None] * len(groups)
    entries = list(given)
    if entries and isinstance(entries[0], Iterable) and not isinstance(entries[0], Tensor):
        return [list(entry) for entry in entries]
    return [entries]


# -- fused_adam_cuda


@torch.no_grad()
def adam(
    p: Tensor, out_p: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    scale: float, step: int, eps_mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """One step of AdamW of 2018, in place, of a parameter `p` with moments `m` and `v`, by the gradient `g / scale`.

    Tensors of one shape; `g` may be 16-bit. `out_p`: gets the stepped parameter in its own dtype, unless it is empty.
    `step`: its number, from 1. Bias corrections multiply the rate. RuntimeError for `eps_mode=0`, eps inside the root.
    """
    if eps_mode == 0:
        raise RuntimeError("fused_adam_cuda.adam(eps_mode=0) is not here: write eps_mode=1, which adds eps to the root")
    factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=p.device)
    step_lists([p], [g], [[m], [v]], factor, lr, (beta1, beta2), eps, step, bool(bias_correction), weight_decay)
    if out_p.numel():
        out_p.copy_(p)


def step_lists(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: _amp_c.Lists, factor: Tensor, lr: Any,
    betas: tuple[float, float], eps: float, step: int, bias_correction: bool, weight_decay: float,
) -> None:  # fmt: skip
    """The same for lists of tensors, by the gradients times `factor`, 0-d float32."""
    beta1, beta2 = betas
    rate = math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else 1.0
    options = kernels.AdamOptions(
        lr=lr * rate, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=True, factor=factor
    )
    copies = [g.to(p.dtype, copy=True) for g, p in zip(grads, params, strict=True)]
    _amp_c.step_with(kernels.adam, options, params, copies, states, _amp_c.LATE)


def maybe_cast_mt(chunk_size: int, noop_flag: Tensor, tensor_lists: _amp_c.Lists) -> None:
    """Copy the first of two lists of tensors into the second, of other dtypes; nothing where `noop_flag` is set."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(torch.where(noop_flag.to(target.device) > 0, target, source.to(target.dtype)))
