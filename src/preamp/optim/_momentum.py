"""Lion and Muon."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import OptimizerError
from ..kernels import LionOptions, MuonOptions, lion, muon
from ..ledger import Bucket
from ..sharding import Parted
from ._loading import check_number, check_several
from ._rounded import CountsForChance


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
