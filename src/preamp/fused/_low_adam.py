"""Adam on bfloat16 weights without float32 masters: exact with 16 bits beside each, or rounded by chance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..multi_tensor import laid_out_like
from ._adam import adam_step
from ._bits import chances_like, join_all, round_by_chance, split
from ._choice import kernels_take, walks
from ._lists import gate_of
from ._options import AdamOptions


def adam_split_(
    lows: list[Tensor], bits: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor], max_exp_avg_sqs: list[Tensor], step: Tensor, *, lr: float | Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float, decoupled: bool, amsgrad: bool, maximize: bool,
    factor: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of Adam, in place, on float32 masters of which the bfloat16 weights are the upper part.

    `lows`: bfloat16 weights; `bits`: int16, what `split` gives beside them. Together they are the float32 masters
    that `adam_` would step, and stay so to the last bit, in 4 bytes a parameter instead of 6. States are float32; the
    rest is as in `adam_`.
    """
    if not lows:
        return
    o = AdamOptions(
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, amsgrad=amsgrad,
        maximize=maximize, factor=factor, found=found,
    )  # fmt: skip
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    if kernels_take([lows, grads, *states], low=True) and walks([lows, grads, bits, *states], None) is None:
        from . import _triton

        _triton.adam_split([lows, laid_out_like(lows, grads), *states, bits], step, o)
        return
    masters = join_all(lows, bits)
    gate = gate_of(lows[0].device, found)
    if gate is None:
        return
    adam_step([masters, grads, *states], None, step, o)
    halves = [split(master) for master in masters]
    gate.write(lows, [weight for weight, _ in halves])
    gate.write(bits, [rest for _, rest in halves])


def adam_stochastic_(
    lows: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor], step: Tensor, *, seed: int, lr: float | Tensor, beta1: float, beta2: float,
    eps: float, weight_decay: float, decoupled: bool, amsgrad: bool, maximize: bool,
    factor: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of Adam, in place, on bfloat16 weights that are all there is: rounded by chance, right in the mean.

    A weight is stepped in float32 and rounded up or down to bfloat16 with the probabilities that keep its expected
    value, so that updates far below its precision are not lost. The chances are a function of `seed`, the step's
    number, the tensor's position in `lows` and the element's place in memory: a run can be repeated, with kernels
    or without. States are float32; the rest is as in `adam_`.
    """
    if not lows:
        return
    o = AdamOptions(
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, amsgrad=amsgrad,
        maximize=maximize, factor=factor, found=found,
    )  # fmt: skip
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    if kernels_take([lows, grads, *states], low=True) and walks([lows, grads, *states], None) is None:
        from . import _triton

        _triton.adam_stochastic([lows, laid_out_like(lows, grads), *states], step, o, seed)
        return
    gate = gate_of(lows[0].device, found)
    if gate is None:
        return
    wide = [low.to(torch.float32) for low in lows]
    taken = step + 1
    adam_step([wide, grads, *states], None, step, o)
    rounded = [round_by_chance(value, chances_like(value, seed, taken, i)) for i, value in enumerate(wide)]
    gate.write(lows, rounded)
