"""FusedNovoGrad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....errors import StateError
from ....formats import LOW_DTYPES
from ....kernels import Tensors, global_norm
from .. import _amp_c, _steps
from ._base import ApexOptimizer, Group, Parameters, constructor


class FusedNovoGrad(ApexOptimizer):
    """NovoGrad (Ginsburg et al. 2019, "Stochastic gradient methods with layer-wise adaptive moments for training of
    deep networks", arXiv:1905.11286), with Apex's arguments.

    `norm_type`: 2 for the L2 norm of a tensor's gradient, 0 for its largest magnitude. `init_zero`: the running norm
    starts from 0, else from the first one. `reg_inside_moment`: weight decay goes into the first moment.
    `grad_averaging`: a new gradient weighs 1 - beta1 there, else 1. The first moment is the state "exp_avg", float32
    for 16-bit parameters. `param_group["exp_avg_sq"]` is a list of two float32 tensors, the running norms (not their
    squares) of the group's 16-bit parameters and of its others, each in the group's order. Raises RuntimeError for
    `amsgrad=True`, another `norm_type` and sparse gradients, ValueError for hyper-parameters out of range.
    """

    state_names = ("exp_avg",)
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
        """With running norms, of which a group has two lists."""
        number = self.count(group)
        for members, norms in zip(_kinds(group["params"]), self._norms(group), strict=True):
            self._step(group, members, norms, number)

    def _step(self, group: dict[str, Any], members: Sequence[Parameter], norms: Tensor, number: int) -> None:
        """Step those of the `members`, all parameters of a group's kind, that have gradients."""
        places = [i for i, param in enumerate(members) if param.grad is not None]
        params = [members[i] for i in places]
        grads = [param.grad for param in params if param.grad is not None]
        whole = len(places) == len(members)
        index = slice(None) if whole else torch.tensor(places, dtype=torch.long, device=norms.device)
        own = norms[index]
        late = [i for i, param in enumerate(params) if "exp_avg" not in self.state.get(param, {})]
        if number > 1 and late and not group["init_zero"]:  # the group's count says that all have started
            order = 2.0 if group["norm_type"] == 2 else math.inf
            firsts = [global_norm([grads[i]], order, device=norms.device) for i in late]
            own[torch.tensor(late, device=norms.device)] = torch.stack(firsts)
        names = ("lr", "betas", "eps", "weight_decay", "bias_correction", "grad_averaging", "norm_type", "init_zero")
        _steps.novograd(
            params, grads, self.states(params, "exp_avg"), own, step=number,
            reg_inside_moment=self.moment_mode == 0, **{name: group[name] for name in names},
        )  # fmt: skip
        norms[index] = own

    def _norms(self, group: dict[str, Any]) -> list[Tensor]:
        """The running norms of a group, made if there are none."""
        sizes = [len(members) for members in _kinds(group["params"])]
        device = group["params"][0].device
        if "exp_avg_sq" not in group:
            group["exp_avg_sq"] = [torch.zeros(size, dtype=torch.float32, device=device) for size in sizes]
        norms: list[Tensor] = group["exp_avg_sq"]
        if [norm.numel() for norm in norms] != sizes:
            group["exp_avg_sq"] = norms = self._refitted(group, sizes)
        return norms

    def _refitted(self, group: dict[str, Any], sizes: list[int]) -> list[Tensor]:
        """Norms that were kept for parameters of other dtypes, or only for those that had gradients."""
        given = [norm.reshape(-1) for norm in group["exp_avg_sq"]]
        numbers = [norm.numel() for norm in given]
        kinds = _kinds(group["params"])
        started = [[i for i, p in enumerate(members) if "exp_avg" in self.state.get(p, {})] for members in kinds]
        if sum(numbers) == sum(sizes) and 0 in numbers and 0 in sizes:  # all parameters have changed kind
            return [torch.cat(given) if size else given[0].new_zeros(0) for size in sizes]
        if numbers == [len(places) for places in started]:
            fitted = [norm.new_zeros(size) for norm, size in zip(given, sizes, strict=True)]
            for norm, kept, places in zip(fitted, given, started, strict=True):
                norm[torch.tensor(places, dtype=torch.long, device=norm.device)] = kept
            return fitted
        raise StateError(
            f"group['exp_avg_sq'] holds running norms of {numbers} 16-bit and other parameters, and the group has "
            f"{sizes}: which norm is whose cannot be told. Load the state before dtypes of parameters change, or drop "
            "it with del group['exp_avg_sq']"
        )

    def mend_group(self, group: dict[str, Any]) -> None:
        """Running norms where the parameters are, and in float32."""
        super().mend_group(group)
        if "exp_avg_sq" in group and group["params"]:
            device = group["params"][0].device
            group["exp_avg_sq"] = [torch.as_tensor(n, dtype=torch.float32, device=device) for n in group["exp_avg_sq"]]
            self._norms(group)


def _kinds(params: Sequence[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """16-bit parameters, and the others."""
    low: list[Parameter] = []
    full: list[Parameter] = []
    for param in params:
        (low if param.dtype in LOW_DTYPES else full).append(param)
    return low, full
