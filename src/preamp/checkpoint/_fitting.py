"""What is checked of a saved state before anything is loaded, since torch loads nearly all that it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adamax, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError, OptimizerError, kind_of
from ..optim import FusedOptimizer, float32_states
from ..sharding import is_sharded
from ._masters import InFloat32

_DEFAULTED = frozenset({"max_grad_norm", "lr_decay", "initial_accumulator_value"})
"""Options of preamp.optim that groups of its siblings in torch or Apex lack."""


NAMES = "param_names"
"""Where a checkpoint has the names of each optimizer's parameters, since the states have only numbers."""


def names_of(models: Mapping[str, Any], optimizer: Any) -> list[str]:
    """The names in the models of an optimizer's parameters, in its order; "" for those of other models."""
    modules = ((key, each) for key, each in models.items() if isinstance(each, nn.Module))
    known = {p: f"{key}.{name}" for key, each in modules for name, p in each.named_parameters()}
    return [known.get(p, "") for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def fitting(what: str, target: Any, state: Any, path: Any) -> Any:
    """The state in the form in which `target` takes it; `CheckpointError` for one that cannot be its own.

    Moments in 8 bits are float32 for optimizers that are not preamp's.
    """
    try:
        if isinstance(target, Optimizer) and "param_groups" in target.state_dict():
            if isinstance(target, FusedOptimizer):
                target.check_loadable(state)
            else:
                state = float32_states(state)
            _check_options(target, state["param_groups"])
            _check_states(target, state)
        elif isinstance(target, (nn.Module, InFloat32)):
            _check_model(target, state)
        elif isinstance(target, (LRScheduler, Optimizer)):  # one of a form of its own, as Lookaheads have
            own = target.state_dict()
            _check_alike(own, state, "it")
            if own.keys().isdisjoint(state):
                raise _Misfit(f"it has {', '.join(own)}, and there are only {', '.join(map(str, state))[:200]}")
    except (_Misfit, OptimizerError) as error:
        raise CheckpointError(
            f"{path} does not fit the {what} it is to be loaded into, so nothing was loaded: {error}"
        ) from error
    return state


class _Misfit(Exception):
    """What is wrong with a state."""


def _check_model(model: nn.Module | InFloat32, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise _Misfit(f"the state of a model is a dict, and this is {kind_of(state)}")
    for name, own in model.state_dict().items():
        saved = state.get(name)
        if not isinstance(own, Tensor) or not isinstance(saved, Tensor) or not own.is_floating_point():
            continue
        if not saved.is_floating_point():
            raise _Misfit(f"{name} is {own.dtype} here and {saved.dtype} there, which would be cast without a word")


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _check_options(optimizer: Optimizer, groups: Any) -> None:
    """`_Misfit` for options that no step can be made with, or that torch's and preamp's optimizers need and lack."""
    needed = optimizer.defaults.keys() if _is_torchs(optimizer) else set()
    needed = optimizer.defaults.keys() - _DEFAULTED if isinstance(optimizer, FusedOptimizer) else needed
    for own, saved in zip(optimizer.param_groups, groups, strict=False):  # torch counts them
        for name in optimizer.defaults.keys() & own.keys():
            here = False if name in ("foreach", "fused") else own[name]  # None, or a flag
            kept = saved.get(name)
            each = kept if isinstance(kept, (list, tuple)) else [kept]
            if kept is not None:
                _check_alike(here, kept, f"its {name!r}")
            elif name in needed and _is_number(here[0] if isinstance(here, tuple) else here):
                raise _Misfit(f"its groups have no {name!r}")
            if any(_is_number(n) and (math.isnan(n) or (name == "lr" and not 0 <= n < math.inf)) for n in each):
                raise _Misfit(f"its {name!r} is {kept!r:.60}, and no step can be made with that")


def _check_states(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`_Misfit` for states of another kind, or of other parameters: torch would load them, and step with them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(set(params)) == len(params) and len(set(numbers)) < len(numbers):
        raise _Misfit(f"its groups name a parameter twice: {numbers!r:.80}")
    strange = state["state"].keys() - set(numbers)
    if strange and (_is_torchs(optimizer) or isinstance(optimizer, FusedOptimizer)):  # they keep no other states
        raise _Misfit(
            f"it has states of {', '.join(map(repr, strange))[:80]}, and parameters are numbered {numbers!r:.80}"
        )
    for param, number in zip(params, numbers, strict=False):
        row = state["state"].get(number, {})
        second = "exp_inf" if isinstance(optimizer, Adamax) else "exp_avg_sq"
        lacks = sorted({"step", "exp_avg", second} - row.keys())
        if _is_torchs(optimizer) and row and "betas" in optimizer.defaults and lacks:
            raise _Misfit(
                f"the state of a parameter has {', '.join(map(str, row))}, and {type(optimizer).__name__} needs "
                f"{' and '.join(lacks)}{'; preamp.optim takes states of Apex, too' * (lacks == ['step'])}"
            )
        for name, value in row.items():
            if name == "step":
                _check_alike(0, value, "the state 'step'")
                if not 0 <= float(value) < math.inf:
                    raise _Misfit(f"the state 'step' is {value!r:.60}, and counts a parameter's steps")
            elif _is_torchs(optimizer) and name in FusedOptimizer.known:
                _check_moment(name, value, param)


def _check_moment(name: str, value: Any, param: Tensor) -> None:
    """`_Misfit` for a moment that is not its parameter's. Momentum may be none yet, or sparse as its gradients."""
    if isinstance(value, Tensor):
        dense = value.layout is torch.strided or name == "momentum_buffer"
        alike = value.is_floating_point() or not param.is_floating_point()
        if is_sharded(value) != is_sharded(param) or (dense and alike and value.shape == param.shape):
            return
    elif value is None and name == "momentum_buffer":
        return
    seen = f"{tuple(value.shape)}, {value.layout}, {value.dtype}" if isinstance(value, Tensor) else kind_of(value)
    raise _Misfit(
        f"its {name!r} for a parameter of shape {tuple(param.shape)} is {seen}: none of its own. Was the order of "
        "layers changed? Give the optimizer its parameters in the order in which they were saved"
    )


def _check_alike(own: Any, saved: Any, where: str) -> None:
    """`_Misfit` for a saved value that is not of the kind of the present one. Everything fits in the place of None."""
    if own is None:
        return
    if isinstance(own, Mapping):
        fits = isinstance(saved, Mapping)
        for name in own.keys() & saved.keys() if fits else ():
            _check_alike(own[name], saved[name], f"{where}'s {name!r}")
    elif isinstance(own, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and (len(own) == len(saved) or not isinstance(own, tuple))
        for before, now in zip(own, saved, strict=False) if fits else ():
            _check_alike(before, now, f"an entry of {where}")
    elif isinstance(own, bool):
        fits = isinstance(saved, bool) or (_is_number(saved) and saved in (0, 1))
    elif _is_number(own):
        fits = _is_number(saved)
    else:
        fits = not isinstance(own, str) or isinstance(saved, str)
    if not fits:
        raise _Misfit(f"{where} is {saved!r:.60}, and here it is {own!r:.60}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.layout is torch.strided and not value.is_complex() and not value.is_meta
    return isinstance(value, (int, float)) and not isinstance(value, bool)
