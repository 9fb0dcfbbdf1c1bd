"""Optimizers whose bfloat16 weights may have split masters, or be rounded stochastically."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from ..errors import OptimizerError
from ..ledger import Bucket
from ._base import FusedOptimizer
from ._loading import check_number


class RoundedOptimizer(FusedOptimizer):
    """A `FusedOptimizer` with split masters, or with `rounding="stochastic"` and no masters.

    Raises `OptimizerError`, a ValueError, for a rounding that it does not know, or that masters make pointless.
    """

    master_kinds: tuple[str | None, ...] = ("float32", "split", "split24", None)
    rounding, seed = "nearest", 0

    def __init__(self, params: Any, defaults: dict[str, Any], master: str | None, rounding: str, seed: int) -> None:
        if rounding not in ("nearest", "stochastic") or (rounding == "stochastic" and master is not None):
            raise OptimizerError(
                f"rounding={rounding!r} with master={master!r}: write 'nearest', or 'stochastic' with master=None, "
                "since masters lose nothing that stochastic rounding could save"
            )
        check_number("seed", seed, low=-float("inf"), whole=True)
        self.rounding, self.seed = rounding, seed
        super().__init__(params, defaults, master)

    def _options(self, bucket: Bucket, **more: Any) -> Any:
        # random numbers depend on the place in a bucket, and buckets must not share them
        seed = self.seed + (bucket.first << 31)
        return super()._options(bucket, stochastic_rounding=self.rounding == "stochastic", seed=seed, **more)

    def state_dtype(self, name: str, param: Parameter) -> torch.dtype:
        """The dtype of a state: float32 also for weights that are rounded stochastically."""
        stochastic = self.rounding == "stochastic" and param.dtype is torch.bfloat16
        return torch.float32 if stochastic else super().state_dtype(name, param)


class CountsForChance(RoundedOptimizer):
    """An optimizer that counts steps for random numbers only."""

    @property
    def counts_steps(self) -> bool:  # type: ignore[override]
        """Whether steps are counted."""
        return self.rounding == "stochastic" or self.master == "split24"
