"""Lets a parameter be another tensor for a while, without anybody noticing who hung something on it.

`parameter.data = other` would do, but where the dtype changes torch then makes a new gradient accumulator, and hooks on
the old one (DistributedDataParallel's, and any on `AccumulateGrad`) never fire again. So the tensors behind two Python
objects change places, as in `torch.utils.swap_tensors`: what is hung on the one, its gradient and its accumulator stay
with it. References from Python (in modules, groups and states of optimizers) see the parameter that they know.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Container

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ..errors import PreampWarning, SessionError


def exchanged(parameter: Parameter, wide: Tensor, gradient: Tensor | None = None) -> Parameter:
    """Have `parameter` be the tensor `wide`, with this gradient; returns a parameter that is what it was before.

    `give_back` of the two is the way back. `SessionError` where something holds a weak reference to the tensor itself,
    and nothing has changed.
    """
    other = Parameter(wide, parameter.requires_grad)
    other.grad = gradient
    give_back(parameter, other)
    return other


def give_back(parameter: Parameter, other: Parameter) -> None:
    """The two change places."""
    try:
        torch._C._swap_tensor_impl(parameter, other)
    except RuntimeError as error:
        raise SessionError(
            f"a master cannot take the place of a parameter of shape {tuple(parameter.shape)}, since something holds a "
            f"weak reference to its tensor ({str(error).splitlines()[0]}): a cast that autocast still keeps, most "
            "often. Leave the autocast region first, or use an optimizer of preamp.optim, which needs no such exchange"
        ) from error


def warn_if_wrapped(parameters: Container[Parameter]) -> None:
    """Say so where a DistributedDataParallel model holds one of these, which are about to change their dtype for good.

    Its hooks lie on the gradient accumulators of the dtype before: nothing would be exchanged from then on.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    for one in gc.get_objects():
        if type(one) in kinds and any(p in parameters for p in one.parameters()):
            warnings.warn(
                "the session is closed, its model is float32 again, and the DistributedDataParallel around it still "
                "waits for 16-bit gradients: to train on, wrap the model anew, or its ranks train apart",
                PreampWarning,
                stacklevel=4,
            )
            return
