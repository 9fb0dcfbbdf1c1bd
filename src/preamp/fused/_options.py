"""The settings of a step as values, so that each way of doing it gets all of them in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
"""Parameters, gradients and states, one list each; a state that an optimizer does without is an empty list."""
Lows = Sequence[Tensor | None] | None
"""The 16-bit twins of a list of float32 parameters; some, or all, may have none."""
Whole = Callable[[Tensor, bool], Tensor]
"""Makes numbers of parts those of whole tensors. (parameters, n) float64 and whether the largest is meant, not the sum;
returns the same shape. Called once a step, whatever the parts are: other processes are waiting.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What every optimizer has."""

    lr: float | Tensor
    maximize: bool
    factor: Tensor | None
    found: Tensor | None
    contiguous: bool = False
    """Whether parameters, states and twins are known to be contiguous, so that nobody has to look."""
    alike: bool = False
    """Whether gradients are known to have the parameters' dtype, so that nobody has to look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamOptions(Options):
    """Adam and AdamW."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDOptions(Options):
    """Gradient descent with momentum."""

    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradOptions(Options):
    """Adagrad."""

    lr_decay: float
    weight_decay: float
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LambOptions(Options):
    """LAMB."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool
    adam_w_mode: bool
    max_grad_norm: float | None
    use_nvlamb: bool
    grad_norm: Tensor | None
    whole: Whole | None

    @property
    def trusts(self) -> bool:
        """Whether updates are scaled by the trust ratio."""
        return self.use_nvlamb or self.weight_decay != 0

    @property
    def one_beta1(self) -> float:
        """What a new gradient weighs in the first moment."""
        return 1 - self.betas[0] if self.grad_averaging else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NovoGradOptions(Options):
    """NovoGrad."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool
    reg_inside_moment: bool
    norm_type: int
    init_zero: bool
    whole: Whole | None

    @property
    def one_beta1(self) -> float:
        """What a new gradient weighs in the first moment."""
        return 1 - self.betas[0] if self.grad_averaging else 1.0
