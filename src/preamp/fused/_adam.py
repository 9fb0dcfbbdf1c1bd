"""Adam and AdamW in one call, on float32 parameters or masters, with 16-bit or float32 gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import _maths, _stock
from ._choice import Way, carry_out
from ._options import AdamOptions, Lists, Lows


def adam_(
    params: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor], lows: Lows, step: Tensor, *, lr: float | Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, amsgrad: bool, maximize: bool,
    factor: Tensor | None = None, found: Tensor | None = None, contiguous: bool = False,
    alike: bool = False,
) -> None:  # fmt: skip
    """One step of Adam (Kingma and Ba 2015), or of AdamW (Loshchilov and Hutter 2019) if `decoupled`, in place.

    `params`: float32, or 16-bit with gradients and states of the same dtype; one dtype and one device in a call.
    `grads`: float16, bfloat16 or float32, of the shapes of `params`; they may come back multiplied by `factor`.
    `exp_avgs`, `exp_avg_sqs`: states in the dtype of `params`; `max_exp_avg_sqs`: the same if `amsgrad`, else empty.
    `lows`: None, or for each parameter None or the 16-bit tensor that its rounded value (nearest, ties to even) is
    written to. `step`: 0-d float32 on the device, how many steps were taken; counts up by 1 here.

    `factor`: 0-d float32 that every gradient is multiplied by in float32. `found`: 0-d float32; above 0 nothing is
    written: no parameter, no twin, no state, no step. `lr`: a number or a 0-d tensor. In a CUDA graph a number is
    frozen, a tensor on the device is read at every replay. `contiguous`: the caller knows that parameters, states and
    twins are contiguous, and saves the time to look; gradients are looked at all the same. `alike`: it knows that
    gradients have the parameters' dtype.

    On the CPU this is bit for bit `torch.optim.Adam(fused=True)` on float32 gradients multiplied by `factor`. Where
    Triton runs it is one launch for each dtype of gradients, and one for the few numbers that all of them need.
    """
    if not params:
        return
    o = AdamOptions(
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, amsgrad=amsgrad,
        maximize=maximize, factor=factor, found=found,
        contiguous=contiguous, alike=alike,
    )  # fmt: skip
    adam_step([params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs], lows, step, o)


def adam_step(lists: Lists, lows: Lows, step: Tensor, o: AdamOptions) -> None:
    """One step of `adam_`, from its settings in one piece."""
    name = "_fused_adamw_" if o.decoupled else "_fused_adam_"
    carry_out(lists, lows, step, o, kernel=_kernel, stock=(name, _stock.adam), plain=_maths.adam)


def _kernel() -> Way:
    from . import _triton

    return _triton.adam
