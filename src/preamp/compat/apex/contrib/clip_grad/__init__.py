"""Clipping of gradients by their global norm."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .....kernels import global_norm, multiply_

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, and the norm of 16-bit gradients is computed in float32, where torch's
    overflows from 65504 on. Returns the norm before clipping, 0-d float32.

    `norm_type`: a positive number, or inf. RuntimeError for a norm that is not finite, with `error_if_nonfinite`.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [each.grad.detach() for each in given if each.grad is not None]
    norm = global_norm(gradients, float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    multiply_(gradients, factor)
    return norm
