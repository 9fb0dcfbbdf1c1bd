"""FusedNovoGrad."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....errors import StateError
from ....formats import LOW_DTYPES
from ....kernels import NovoGradOptions, Tensors, global_norm
from .. import _amp_c, _steps
from ._base import ApexOptimizer, Group, Parameters, constructor


class FusedNovoGrad(ApexOptimizer):
    """NovoGrad (Ginsburg et al. 2019, "Stochastic gradient methods with layer-wise adaptive moments for training of
    deep networks", arXiv:1905.11286), with Apex's arguments.

    `norm_type`: 2 for the L2 norm of a tensor's gradient, 0 for its largest magnitude. `init_zero`: the running norm
    starts from 0, else from the first one. `reg_inside_moment`: weight decay goes into the first moment.
    `grad_averaging`: a new gradient weighs 1 - beta1 there, else 1. The first moment is the state "exp_avg", float32
    for 16-bit parameters; the running norm, not its square, is the state "norm", 0-d float32. A state_dict has the
    norms where Apex's has them. Raises RuntimeError for `amsgrad=True`, another `norm_type` and sparse gradients,
    ValueError for hyper-parameters out of range.
    """

    kernel, options, state_names = staticmethod(_steps.novograd), NovoGradOptions, ("exp_avg", "norm")
    multi_tensor_novograd = staticmethod(_amp_c.multi_tensor_novograd)

    __init__ = constructor(
        "set_grad_none",
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
        reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any]) -> None:
        if defaults["norm_type"] not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad only supports the L2 and the infinity norm, and "
                f"norm_type={defaults['norm_type']!r} is neither: write 2 or 0"
            )
        self.moment_mode = 0 if defaults.pop("reg_inside_moment") else 1
        super()._begin(params, defaults)

    def step_group(self, group: Group, params: Parameters, grads: Tensors, **more: Any) -> None:
        """With the running norms of gradients."""
        order = 2.0 if group["norm_type"] == 2 else math.inf
        late = int(group.get("step", 0)) > 0 and not group["init_zero"]  # the group's count says that all have started
        for param, grad in zip(params, grads, strict=True):
            if "norm" not in self.state[param]:
                self.state[param]["norm"] = global_norm([grad] if late else [], order, device=param.device)
        super().step_group(group, params, grads, reg_inside_moment=self.moment_mode == 0, **more)

    def state_dict(self) -> dict[str, Any]:
        """As Apex's: the running norms are `param_group["exp_avg_sq"]`, two tensors, in the order of the parameters.

        They are those of the group's 16-bit parameters and of its others that have been stepped.
        """
        saved = super().state_dict()
        states = {key: dict(row) for key, row in saved["state"].items()}
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            norms: tuple[list[Tensor], list[Tensor]] = ([], [])
            for param, key in zip(own["params"], group["params"], strict=True):
                if "norm" in states.get(key, {}):
                    norms[param.dtype not in LOW_DTYPES].append(states[key].pop("norm"))
            if any(norms):
                group["exp_avg_sq"] = [torch.stack(each) if each else torch.zeros(0) for each in norms]
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the others do. `StateError`, a ValueError, where it cannot be told which running norm is whose."""
        states, groups = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
        for own, group in zip(self.param_groups, groups, strict=False):
            if "exp_avg_sq" in group:
                norms = [torch.as_tensor(each).reshape(-1) for each in group.pop("exp_avg_sq")]
                are_low = [param.dtype in LOW_DTYPES for param in own["params"]]
                for key, norm in zip(_owners(norms, group["params"], are_low, states), torch.cat(norms), strict=True):
                    states[key] = {**states[key], "norm": norm}
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})

    def mend_group(self, group: dict[str, Any]) -> None:
        """Running norms are float32, whatever the parameters are."""
        super().mend_group(group)
        for own in (self.state[param] for param in group["params"] if "norm" in self.state.get(param, {})):
            own["norm"] = own["norm"].float()


def _owners(norms: list[Tensor], keys: list[Any], are_low: list[bool], states: dict[Any, Any]) -> list[Any]:
    """Of which parameters these are the norms; those that have started have one."""
    sizes = [each.numel() for each in norms]
    started = [i for i, key in enumerate(keys) if "exp_avg" in states.get(key, {})]
    low, full = ([i for i in started if are_low[i] is kind] for kind in (True, False))
    if sizes == [len(low), len(full)]:
        return [keys[i] for i in (*low, *full)]
    if sum(sizes) == len(started) and 0 in sizes and not (low and full):  # all have another kind than when saved
        return [keys[i] for i in started]
    raise StateError(
        f"group['exp_avg_sq'] holds running norms of {sizes} 16-bit and other parameters, of which the group "
        f"has {[len(low), len(full)]} that have been stepped: which norm is whose cannot be told. Load the state "
        "before dtypes of parameters change, or drop it with del group['exp_avg_sq']"
    )
