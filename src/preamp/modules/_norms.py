"""Which modules are norms, and what their kernels take."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from ..errors import SessionError

NORMS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""torch's own."""

_SURELY, _MAYBE = re.compile(r"(?i)(rms|layer|group|batch|instance)_?norm"), re.compile(r"(?i)norm|rms")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is what a policy's `norms` field is about: torch's norms, and those written by hand.

    One of the latter (LlamaRMSNorm, T5LayerNorm, a model's own) has nothing inside and nothing to learn but a scale and
    a shift, for each channel unless its name leaves no doubt. Running statistics leave none either.
    """
    if isinstance(module, NORMS):
        return True
    own = [p for p in module.parameters(recurse=False) if not is_lazy(p)]
    if not 1 <= len(own) <= 2 or next(module.children(), None) is not None:
        return False
    for_channels = all(p.dim() > 0 and p.numel() == max(p.shape) for p in own)
    if {"running_mean", "running_var"} <= set(module._buffers.keys()):  # a list, of a scripted module
        return True
    names = [kind.__name__ for kind in type(module).__mro__ if kind is not nn.Module]
    return any(map(_SURELY.search, names)) or (for_channels and any(map(_MAYBE.search, names)))


def refuse_unfit(path: str, module: nn.Module) -> None:
    """`SessionError` for a module whose parameters cannot become 16-bit: one of TorchScript, or of Keras."""
    if isinstance(module, torch.jit.ScriptModule):
        raise SessionError(
            f"{path or 'the model'} is scripted or traced by torch.jit, and its code has no place for casts: prepare() "
            "the module that it was made from, or take level='O1' or 'O4', which leave modules as they are"
        )
    if any(kind.__module__.partition(".")[0] == "keras" for kind in type(module).__mro__):
        raise SessionError(
            f"{path or 'the model'} is a layer of Keras ({type(module).__name__}), which has all its parameters in a "
            "dict, and those of norms would be rounded to 16 bits like the rest: take level='O1' or 'O4', which leave "
            "parameters float32"
        )


@lru_cache
def mixes(kind: type[nn.Module], device_type: str, low: torch.dtype) -> bool:
    """Whether torch's kernel for a norm takes 16-bit activations with float32 weights: asked of it once, by trying.

    Where it does, it computes in float32 inside, and two casts of the activations in each direction are spared. Batch
    norm does everywhere; for the others it depends on the device and on the version of torch.
    """
    if issubclass(kind, _BatchNorm):
        return True
    probes: dict[type[nn.Module], tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        nn.LayerNorm: (lambda: nn.LayerNorm(8, device=device_type), (2, 8)),
        nn.GroupNorm: (lambda: nn.GroupNorm(2, 4, device=device_type), (2, 4, 3)),
        _InstanceNorm: (lambda: nn.InstanceNorm1d(4, affine=True, device=device_type), (2, 4, 3)),
    }
    for base, (make, shape) in probes.items():
        if issubclass(kind, base):
            try:
                with torch.enable_grad(), torch.autocast(device_type, enabled=False):
                    given = torch.zeros(shape, dtype=low, device=device_type, requires_grad=True)
                    result = make()(given)
                    result.sum().backward()
            except (RuntimeError, NotImplementedError):
                return False
            return result.dtype is low
    return False
