"""SGD, Adagrad, Lion and Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import AdagradOptions, LionOptions, MuonOptions, SGDOptions, adagrad, lion, muon, sgd
from ..ledger import Bucket
from ..sharding import Parted
from ._base import FusedOptimizer
from ._loading import check_number, check_several
from ._rounded import CountsForChance


class SGD(CountsForChance):
    """Gradient descent with the arguments, groups and state_dict of `torch.optim.SGD`: momentum, dampening, Nesterov.

    `foreach` and `fused` are taken for compatibility. `master`, `rounding` and `seed` are those of `Adam`.

    >>> optimizer = preamp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    kept = ("momentum_buffer",)
    options, kernel = SGDOptions, staticmethod(sgd)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults, master, rounding, seed)

    def check_options(self, group: dict[str, Any]) -> None:
        """Check the options of a group: Nesterov's form needs momentum, and no dampening."""
        super().check_options(group)
        momentum, dampening = group["momentum"], group["dampening"]
        check_number("dampening", dampening, low=-float("inf"))
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise OptimizerError(
                f"nesterov=True with momentum={momentum!r} and dampening={dampening!r}: it looks ahead along the "
                "momentum, so it needs momentum above 0 and dampening=0"
            )

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Name the state: the momentum buffer, where there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make a momentum buffer of zeros, which the first step replaces by its gradient."""
        self.unstarted.add(param)
        return super().new_state(name, group, param, dtype)

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        first, found = bucket.params[0] in self.unstarted, more["found"]
        if first and found is not None and bucket.group["dampening"] == 0:
            first = False  # zeros times the momentum, plus the gradient: the same, and right if this is skipped
        elif first and found is not None and bool(found):  # only the host can tell the next step that it is the first
            return
        self.unstarted.difference_update(bucket.params)
        super()._advance(bucket, gradients, **more, first=first)


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011) with the arguments, groups and state_dict of `torch.optim.Adagrad`.

    Dense gradients only.

    Args:
        master: "float32" keeps masters of 16-bit parameters, None steps them in their own dtype.

    >>> optimizer = preamp.optim.Adagrad(model.parameters(), lr=1e-2)
    """

    kept = ("sum",)
    options, kernel = AdagradOptions, staticmethod(adagrad)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = "float32",
    ) -> None:
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults, master)

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make the sum of squared gradients at its initial value."""
        return torch.full_like(
            param, group["initial_accumulator_value"], dtype=dtype, memory_format=torch.preserve_format
        )


class Lion(CountsForChance):
    """Lion (Chen et al. 2023, arXiv 2302.06675): each weight moves by `lr` along the sign of a moving average.

    p <- (1 - lr weight_decay) p - lr sign(beta1 m + (1 - beta1) g); m <- beta2 m + (1 - beta2) g. A tenth to a third
    of AdamW's learning rate, and three to ten times its weight decay, are usual. `master`, `rounding` and `seed` are
    those of `Adam`.

    >>> optimizer = preamp.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    kept = ("exp_avg",)
    options, kernel = LionOptions, staticmethod(lion)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        master: str | None = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, master, rounding, seed)


class Muon(CountsForChance):
    """Muon (Jordan et al. 2024) with the arguments, groups and state_dict of `torch.optim.Muon`: for weight matrices.

    The momentum of each matrix is orthogonalized, in bfloat16, by `ns_steps` iterations of Newton and Schulz. Matrices
    of one shape are orthogonalized together, where torch takes them one by one; shards (DTensors) are gathered for it.
    Give embeddings, biases, norms and the output layer to an optimizer of their own, as `AdamW`; a session takes both.
    `master`, `rounding` and `seed` are those of `Adam`.

    Args:
        adjust_lr_fn: None or "original", or "match_rms_adamw", with which AdamW's learning rate and weight decay fit.

    >>> muon = preamp.optim.Muon(matrices, lr=0.02)
    >>> session = preamp.prepare(model, [muon, preamp.optim.AdamW(others)], level="O5")
    """

    kept = ("momentum_buffer",)
    options, kernel = MuonOptions, staticmethod(muon)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        master: str | None = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults, master, rounding, seed)

    def check_options(self, group: dict[str, Any]) -> None:
        """Check the options of a group, those of the iteration among them, and that parameters are matrices."""
        super().check_options(group)
        check_number("momentum", group["momentum"], high=1.0)
        check_number("ns_steps", group["ns_steps"], high=100, whole=True)
        for i, number in enumerate(check_several("ns_coefficients", group["ns_coefficients"], 3)):
            check_number(f"ns_coefficients[{i}]", number, low=-float("inf"))
        if (kind := group["adjust_lr_fn"]) not in (None, "original", "match_rms_adamw"):
            raise OptimizerError(f"adjust_lr_fn={kind!r}: write 'original' or 'match_rms_adamw'")
        for param in group["params"]:
            if param.dim() != 2:
                raise OptimizerError(
                    f"a parameter has shape {tuple(param.shape)}, and Muon orthogonalizes matrices: give it "
                    "[p for p in ... if p.dim() == 2], and the others to preamp.optim.AdamW"
                )

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        super()._advance(bucket, gradients, **more, shards=list(map(Parted, bucket.params)) if bucket.sharded else None)
