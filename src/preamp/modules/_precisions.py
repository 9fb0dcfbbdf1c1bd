"""Which precision each module of a model has under a policy."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..errors import PolicyError
from ..formats import LOW_DTYPES, name_of
from ..policy import Policy, Precision
from ._norms import is_norm

_COMPILED = "_orig_mod"
"""Under which name torch.compile's wrapper of a module keeps the module."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that a compiled or parallel wrapper wraps (whose parameters are the same objects)."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, _COMPILED, None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def precisions_of(root: nn.Module, policy: Policy) -> Iterator[tuple[str, torch.dtype | None]]:
    """(path, dtype) of every module; None where the policy's own dtypes hold. Raises for ambiguity and for no match.

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
    idle = [pattern for pattern, _, _ in compiled if pattern not in used]
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
