"""Which precision each module of a model has under a policy, and which modules are norms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import PolicyError, SessionError
from ..formats import LOW_DTYPES, name_of
from ..policy import Policy, Precision

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
            "the module that it was made from, or take level='O1', which leaves modules as they are"
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


_COMPILED = "_orig_mod"
"""Under which name torch.compile's wrapper of a module keeps the module."""


def precisions_of(root: nn.Module, policy: Policy, *, first: bool = True) -> Iterator[tuple[str, torch.dtype | None]]:
    """(path, dtype) of every module; None where the policy's own dtypes hold.

    `PolicyError` for a module that several rules want in different precisions, and, at `first`, for a rule of none: the
    module of a rule may be replaced later.

    A block that torch.compile wraps has the path that it had before, for itself and for what is inside. What computes a
    parametrized weight (weight norm, orthogonal weights), or emulates a quantized one, is float32 where parameters
    are 16-bit, unless a rule says otherwise: its kernels have no 16-bit forms, or lose much in them.
    """
    compiled = [(pattern, re.compile(pattern), precision) for pattern, precision in policy.modules]
    used: set[str] = set()
    found: dict[str, torch.dtype | None] = {}
    for path, module in root.named_modules():
        if _COMPILED in module._modules:  # it hands calls on, past its class: what it wraps has its path, and casts
            found[path] = found[path.rpartition(".")[0]]
            continue
        paths = {path, path.replace(f".{_COMPILED}", "")}
        matching = [(p, precision) for p, regex, precision in compiled if any(map(regex.fullmatch, paths))]
        exact = [(pattern, precision) for pattern, precision in matching if pattern in paths]
        used.update(pattern for pattern, _ in matching)
        chosen = exact or matching
        if len({precision for _, precision in chosen}) > 1:
            rules = ", ".join(f"{p!r} -> {x if isinstance(x, str) else name_of(x)}" for p, x in chosen)
            raise PolicyError(
                f"the module {path!r} matches several rules of different precision: {rules}. "
                f"Make the patterns exclusive, or add a rule for exactly {path!r}"
            )
        parent = found[path.rpartition(".")[0]] if path else None
        if chosen:
            found[path] = _as_dtype(chosen[0][1], policy)
        elif policy.params in LOW_DTYPES and (isinstance(module, ParametrizationList) or _fakes(module)):
            found[path] = torch.float32  # a weight is computed in float32 and rounded once, as a master is
            of, _, name = path.rpartition(".parametrizations.")
            if name and policy.norms is torch.float32 and is_norm(root.get_submodule(of)):
                found[path.rpartition(".")[0]] = torch.float32  # and that of a norm is not rounded
        else:
            found[path] = parent
    idle = [pattern for pattern, _, _ in compiled if first and pattern not in used]
    if idle:
        some = ", ".join(path for path in list(found)[1:6])
        raise PolicyError(
            f"no module matches {', '.join(map(repr, idle))}; paths look like: {some or '(no sub-modules)'}"
        )
    yield from found.items()


def _fakes(module: nn.Module) -> bool:
    """Whether it is one of torch.ao's for quantization-aware training, which few programs import."""
    return any(
        kind.__name__ == "FakeQuantizeBase" and kind.__module__.startswith("torch.ao.") for kind in type(module).__mro__
    )


def _as_dtype(precision: Precision, policy: Policy) -> torch.dtype | None:
    if precision == "low" or precision is policy.compute:
        return None
    return torch.float32 if precision == "full" else precision
