"""Adam and AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import AdamOptions, adam, adam_8bit, blocks_of
from ..ledger import Bucket
from ..sharding import held_here
from ._eight_bit import CODES, NAMES, SCALES, as_8bit, as_float32, new_8bit, takes_8bit
from ._rounded import RoundedOptimizer


class Adam(RoundedOptimizer):
    """Adam (Kingma and Ba 2015) with the arguments, groups and state_dict of `torch.optim.Adam`.

    `foreach`, `capturable` and `fused` are accepted for compatibility: every step is fused and may be captured. On a
    CPU float32 parameters are stepped bit for bit as by `torch.optim.Adam(fused=True)`. States of either kind load into
    an optimizer of the other.

    Args:
        master: "float32" keeps masters of 16-bit parameters; "split", for bfloat16 ones, keeps the same numbers in 2
            bytes a parameter less, and "split24" 24 bits of them in 3 less, rounded stochastically; None steps them in
            their own dtype.
        rounding: With `master=None`: "stochastic" rounds bfloat16 weights stochastically, so that small updates are not
            lost; states are float32 then.
        states: "8bit" keeps both moments of a parameter of 4096 elements or more in 8 bits, not with `amsgrad`; of
            DTensors only those whose rows are whole blocks of 256, so that any number of ranks can resume.
        seed: The seed of all stochastic rounding, for reproducible runs.

    >>> optimizer = preamp.optim.Adam(model.parameters(), lr=1e-3, master="split")
    """

    kept = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", *NAMES)
    options, kernel = AdamOptions, staticmethod(adam)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master: str | None = "float32",
        rounding: str = "nearest",
        states: str = "float32",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "capturable": capturable, "decoupled_weight_decay": decoupled_weight_decay,
            "differentiable": differentiable,
        }  # fmt: skip
        if states not in ("float32", "8bit"):
            raise OptimizerError(f"states={states!r}: write 'float32', or '8bit' for moments in 8 bits")
        self.states = states
        super().__init__(params, defaults, master, rounding, seed)

    def check_options(self, group: dict[str, Any]) -> None:
        """Check the options of a group: AMSGrad has no states in 8 bits."""
        super().check_options(group)
        self.state_names(group)

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Name the states: first and second moment, and the largest second moment of AMSGrad."""
        if self.states == "8bit" and group["amsgrad"]:
            raise OptimizerError(
                "states='8bit' with amsgrad=True: a largest second moment would grow by every rounding up; write "
                "amsgrad=False, or states='float32'"
            )
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]

    def names_for(self, group: dict[str, Any], param: Parameter) -> tuple[str, ...]:
        """Name one parameter's states, with the scales of moments in 8 bits."""
        names = self.state_names(group)
        return NAMES if self._is_coded(param) else names

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make a state for the first step: zeros, or codes and scales of moments in 8 bits."""
        return new_8bit(name, param) if self._is_coded(param) else super().new_state(name, group, param, dtype)

    def state_dtype(self, name: str, param: Parameter) -> torch.dtype:
        """The dtype of a state: that of codes or scales for moments in 8 bits."""
        return CODES.get(name, torch.float32) if self._is_coded(param) else super().state_dtype(name, param)

    def state_form(self, name: str, param: Tensor) -> torch.Size | int:
        """The shape of a state, or for scales the number of blocks."""
        return blocks_of(held_here(param).numel()) if name in SCALES else super().state_form(name, param)

    def _is_coded(self, param: Tensor) -> bool:
        return self.states == "8bit" and takes_8bit(param)

    def _mend(self, param: Parameter, state: dict[str, Any]) -> None:
        if self._is_coded(param):
            as_8bit(state, param)
        else:
            super()._mend(param, state)

    def _readable(self, row: Any, param: Parameter) -> Any:
        return row if self._is_coded(param) else as_float32(row)

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        if "exp_avg_scale" not in bucket.names:
            super()._advance(bucket, gradients, **more)
            return
        first, first_scales, second, second_scales = bucket.storage.states
        if bucket.sharded:  # scales are in rows there
            first_scales, second_scales = ([each.view(-1) for each in each] for each in (first_scales, second_scales))
        storage = replace(bucket.storage, states=(first, second, first_scales, second_scales))
        adam_8bit(storage, gradients, self._options(bucket, **more))


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019) with the arguments, groups and state_dict of `torch.optim.AdamW`.

    `master`, `rounding`, `states` and `seed` are those of `Adam`.

    >>> optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = "float32",
        rounding: str = "nearest",
        states: str = "float32",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable,
            differentiable=differentiable, decoupled_weight_decay=True, master=master, rounding=rounding, states=states,
            seed=seed,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of an older torch does not say so
            group["decoupled_weight_decay"] = True
