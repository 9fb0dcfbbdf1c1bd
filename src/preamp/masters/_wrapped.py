"""DistributedDataParallel around parameters with masters: what cannot be done there is refused, not done silently."""

from __future__ import annotations

import gc
from collections.abc import Container

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ..errors import SessionError


def refuse_wrapped(parameters: Container[Parameter]) -> int:
    """Raise `SessionError` where a DistributedDataParallel model holds one of these 16-bit parameters.

    A parameter whose data changes its dtype, as it does while an optimizer steps its master, gets a new gradient
    accumulator, and the wrapper's hooks lie on the old one: from then on gradients are not exchanged, and nothing says
    so. Returns how many looks were taken: 0 outside of a process group, where there is nothing to look for.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    for one in gc.get_objects():
        if type(one) in kinds and any(p in parameters for p in one.parameters()):
            raise SessionError(
                "DistributedDataParallel holds parameters with masters, and would lose its gradient hooks when masters "
                "take their place, for a step of this optimizer, unscale_(), full_precision() or a loaded state: ranks "
                "would train apart. Use an optimizer of preamp.optim, which needs no such exchange (and clip with "
                "session.clip_grad_norm_, load states before the model is wrapped), or level='O1' or 'O4'"
            )
    return 1
