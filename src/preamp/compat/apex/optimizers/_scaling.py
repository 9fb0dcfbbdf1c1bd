"""What a GradScaler tells an optimizer that skips and unscales by itself, on the device."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import OptState


class Scaling(NamedTuple):
    """`factor`: what gradients have to be multiplied by; `found`: above 0, the step is skipped. 0-d float32 or None."""

    factor: Tensor | None
    found: Tensor | None


def scaling_of(optimizer: Any, grad_scaler: Any) -> Scaling:
    """How the gradients of `optimizer` are scaled.

    `grad_scaler`: the `torch.amp.GradScaler` whose step this is, or None: then the attributes `grad_scale` and
    `found_inf`, torch's newer protocol, speak. Gradients that the scaler has unscaled already are not divided again.
    """
    if grad_scaler is None:
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        return Scaling(None if scale is None else _inverse(scale), getattr(optimizer, "found_inf", None))
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is OptState.UNSCALED:
        return Scaling(None, _any(state["found_inf_per_device"]))
    found = _any(grad_scaler._check_inf_per_device(optimizer))
    return Scaling(_inverse(grad_scaler._get_scale_async()), found)


def _inverse(scale: Tensor) -> Tensor:
    # float64 has no home on MPS, and elsewhere makes the quotient exact to the last bit
    wide = scale if scale.device.type == "mps" else scale.double()
    return wide.reshape(()).reciprocal().float()


def _any(flags: dict[Any, Tensor]) -> Tensor | None:
    found = None
    for flag in flags.values():
        flag = flag.reshape(())
        found = flag if found is None else found + flag.to(found.device)
    return found
