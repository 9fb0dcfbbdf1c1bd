"""The arguments of a step: the tensors that it writes, and its options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..sharding import Parted

Tensors = Sequence[Tensor]

ShardSum = Callable[[Tensor, bool], Tensor]
"""Combines numbers of shards into those of whole tensors. It takes (parameters, n) float64, and whether to take the
largest instead of the sum; it returns the same shape. Call it once a step, whatever the shards: ranks wait for it.
"""


@dataclass(slots=True)
class Storage:
    """Parameters with everything that is stored for them, one list each, on one device.

    `params` have one dtype: float32 (also masters), float64, or 16 bits. A state that the options do not need is an
    empty list.
    """

    params: Tensors
    states: Sequence[Tensors] = ()
    """In the order in which the algorithm names them."""
    step: Tensor | None = None
    """0-d float32 on the device: the number of steps taken. A step that is not skipped adds 1."""
    copies: Tensors | None = None
    """16-bit tensors of one dtype that get the new parameters, rounded to nearest even."""
    bits: Tensors | None = None
    """What `bits.split` keeps of masters beside bfloat16 `params`: int16, or int8, which is rounded stochastically."""
    chosen: tuple[Any, torch.dtype, Any] | None = None
    """The implementation that takes these tensors, with what it was chosen from, and for which dtype of gradients."""

    def at(self, places: Sequence[int] | slice) -> Storage:
        """The storage of some of the parameters."""

        def some(tensors: Sequence[Any] | None) -> Sequence[Any]:
            if not tensors:
                return ()
            return tensors[places] if isinstance(places, slice) else [tensors[i] for i in places]

        states, copies, bits = list(map(some, self.states)), some(self.copies) or None, some(self.bits) or None
        return replace(self, params=some(self.params), states=states, copies=copies, bits=bits)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of every algorithm."""

    lr: float | Tensor
    """A number or a 0-d tensor. In a CUDA graph a number is frozen; a tensor on the device is read at every replay."""
    weight_decay: float = 0.0
    maximize: bool = False
    factor: Tensor | None = None
    """0-d float32 that every gradient is multiplied by, in float32."""
    found: Tensor | None = None
    """0-d float32; above 0 nothing is written: no parameter, copy or state, and no step is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedOptions(Options):
    """The options of algorithms that step bfloat16 parameters without masters, too."""

    stochastic_rounding: bool = False
    """Of bfloat16 parameters without masters."""
    seed: int = 0
    """For stochastic rounding, of parameters or of 8-bit states; 62 bits of it are used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamOptions(RoundedOptions):
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019) if the weight decay is decoupled."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled_weight_decay: bool = False
    amsgrad: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LionOptions(RoundedOptions):
    """Lion (Chen et al. 2023). Weight decay is decoupled."""

    betas: tuple[float, float] = (0.9, 0.99)
    """The weight of the old moment in the update, and in the new moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonOptions(RoundedOptions):
    """Muon (Jordan et al. 2024), with the options of `torch.optim.Muon`. Weight decay is decoupled."""

    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    shards: Sequence[Parted] | None = None
    """Where this process steps parts of the matrices: how each relates to the whole."""

    def ratio(self, shape: Sequence[int]) -> float:
        """What the learning rate of a matrix is multiplied by.

        "original" (Jordan): sqrt(max(1, rows / columns)). "match_rms_adamw" (Liu et al. 2025, arXiv 2502.16982): 0.2
        sqrt(max(rows, columns)), for which the learning rates of AdamW fit.
        """
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / max(1, columns)))  # a matrix may be empty


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDOptions(RoundedOptions):
    """Gradient descent with momentum; `torch.optim.SGD` defines what the numbers mean."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    first: bool = False
    """Whether the momentum buffers hold nothing yet and become the gradient itself, without dampening."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdagradOptions(Options):
    """Adagrad (Duchi, Hazan and Singer 2011). The learning rate of step t is lr / (1 + (t - 1) lr_decay)."""

    lr_decay: float = 0.0
    eps: float = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerwiseOptions(Options):
    """What LAMB and NovoGrad share."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    bias_correction: bool = True
    grad_averaging: bool = True
    """Whether a new gradient has the weight 1 - beta1 in the first moment; else 1."""
    shard_sum: ShardSum | None = None
    """Where this process has shards of the tensors."""

    @property
    def one_beta1(self) -> float:
        """The weight of a new gradient in the first moment."""
        return 1 - float(self.betas[0]) if self.grad_averaging else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LambOptions(LayerwiseOptions):
    """LAMB (You et al. 2020), with the options of Apex's `FusedLAMB`.

    Gradients are first divided by max(1, their global norm / `max_grad_norm`). The update of a tensor is scaled by the
    trust ratio, norm of the parameter over norm of the update, unclipped; 1 where either is 0.
    """

    adam_w_mode: bool = True
    """Whether weight decay is added to the update, else to the gradient."""
    max_grad_norm: float | None = 1.0
    """None or 0: gradients are not clipped."""
    use_nvlamb: bool = False
    """Whether tensors without weight decay have a trust ratio too."""
    grad_norm: Tensor | None = None
    """0-d float32: the global norm of the true gradients, if known (of all groups, say); None: compute it of these."""

    @property
    def trusts(self) -> bool:
        """Whether updates are scaled by the trust ratio."""
        return self.use_nvlamb or self.weight_decay != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NovoGradOptions(LayerwiseOptions):
    """NovoGrad (Ginsburg et al. 2019), with the options of Apex's `FusedNovoGrad`."""

    reg_inside_moment: bool = False
    """Whether weight decay goes into the first moment with the normed gradient; else the first moment is of bare
    gradients, and norm and weight decay come in when it is applied."""
    norm_type: int = 2
    """2: squares of L2 norms are averaged; 0: the largest magnitudes themselves."""
    init_zero: bool = False
    """Whether the average starts from 0 instead of from the first norm."""
