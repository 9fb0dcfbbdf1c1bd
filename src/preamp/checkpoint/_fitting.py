"""What is checked of a saved state before anything is loaded, since torch loads nearly all that it is given."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adamax, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError, OptimizerError, kind_of
from ..optim import FusedOptimizer, float32_states
from ..sharding import is_sharded
from ._masters import WithMasters

_DEFAULTED = frozenset({"max_grad_norm", "lr_decay", "initial_accumulator_value"})
"""Options of preamp.optim that groups of its siblings in torch or Apex lack."""


def fitting(what: str, target: Any, state: Any, path: Any) -> Any:
    """The state in the form in which `target` takes it; `CheckpointError` for one that cannot be its own.

    Moments in 8 bits are float32 for optimizers that are not preamp's.
    """
    try:
        if isinstance(target, Optimizer):
            if isinstance(target, FusedOptimizer):
                target.check_loadable(state)
            else:
                state = float32_states(state)
            _check_optimizer(target, state)
        if isinstance(target, (nn.Module, WithMasters)):
            _check_model(target, state)
        elif isinstance(target, LRScheduler):
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


def _check_model(model: nn.Module | WithMasters, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise _Misfit(f"the state of a model is a dict, and this is {kind_of(state)}")
    for name, own in model.state_dict().items():
        saved = state.get(name)
        if not isinstance(own, Tensor) or not isinstance(saved, Tensor) or not own.is_floating_point():
            continue
        if not saved.is_floating_point():
            raise _Misfit(f"{name} is {own.dtype} here and {saved.dtype} there, which would be cast without a word")


def _check_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """`_Misfit` for options and states of another kind, and for states in the order of other parameters.

    torch loads them, as it loads a state of any shape, and the next step goes on with the moments of other parameters.
    """
    torchs = type(optimizer).__module__.startswith("torch.optim.")
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):  # torch counts them
        options = {name: value for name, value in own.items() if name in optimizer.defaults}
        if torchs:
            _check_options(options, saved)
        elif isinstance(optimizer, FusedOptimizer):
            _check_options({name: options[name] for name in options.keys() - _DEFAULTED}, saved)
        _check_alike(options, {name: saved[name] for name in options.keys() & saved if saved[name] is not None}, "it")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(set(params)) == len(params) and len(set(numbers)) < len(numbers):
        raise _Misfit(f"its groups name a parameter twice: {numbers!r:.80}")
    strange = state["state"].keys() - set(numbers)
    if strange and (torchs or isinstance(optimizer, FusedOptimizer)):  # which keep states of parameters only
        raise _Misfit(
            f"it has states of {', '.join(map(repr, strange))[:80]}, and parameters are numbered {numbers!r:.80}"
        )
    named: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for param, number in zip(params, numbers, strict=False):
        row = state["state"].get(number, {})
        second = "exp_inf" if isinstance(optimizer, Adamax) else "exp_avg_sq"
        if torchs and row and "betas" in optimizer.defaults and not {"exp_avg", second} <= row.keys():
            raise _Misfit(
                f"the state of a parameter has {', '.join(map(str, row))}, and {type(optimizer).__name__} needs moments"
            )
        for name, value in row.items():
            if name == "step":
                _check_alike(0, value, "the state 'step'")
                if not 0 <= float(value) < math.inf:
                    raise _Misfit(f"the state 'step' is {value!r:.60}, and counts a parameter's steps")
            elif torchs and name in FusedOptimizer.known and not _is_state(name, value, param):
                what = f"{value.layout}, {value.dtype}" if isinstance(value, Tensor) else kind_of(value)
                raise _Misfit(f"the state {name!r} of a parameter is {what}, not a tensor of floating numbers")
            if isinstance(value, Tensor) and is_sharded(value) == is_sharded(param):
                named[name].append((tuple(param.shape), tuple(value.shape)))
    for name, pairs in named.items():
        shapes, found = zip(*pairs, strict=True)
        if shapes != found and Counter(shapes) == Counter(found):
            shape, seen = next(pair for pair in pairs if pair[0] != pair[1])
            raise _Misfit(
                f"its {name!r} for a parameter of shape {shape} has shape {seen}, which is another parameter's. Was "
                "the order of layers changed since it was saved? Give the optimizer its parameters in the order in "
                "which they were"
            )
        for shape, seen in pairs if torchs and name in FusedOptimizer.known else ():
            if seen != shape:
                raise _Misfit(f"its {name!r} for a parameter of shape {shape} has shape {seen}")


def _check_options(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """`_Misfit` for a group that lacks what a step needs, all but flags, which torch itself adds, or has NaN for it."""
    for name, value in own.items():
        kept: Any = saved.get(name)
        if name in ("foreach", "fused"):  # None, or a flag
            _check_alike(own=False, saved=False if kept is None else kept, where=f"its {name!r}")
        elif kept is None and _is_number(value[0] if isinstance(value, tuple) else value):
            raise _Misfit(f"its groups have no {name!r}")
        for each in kept if isinstance(kept, (list, tuple)) else [kept]:
            if _is_number(each) and (math.isnan(each) or (name == "lr" and not 0 <= each < math.inf)):
                raise _Misfit(f"its {name!r} is {kept!r:.60}, and no step can be made with that")


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


def _is_state(name: str, value: Any, param: Tensor) -> bool:
    """Whether a value is a moment of floating numbers; momentum may be none yet, and of sparse gradients is sparse."""
    if not isinstance(value, Tensor):
        return value is None and name == "momentum_buffer"
    dense = value.layout is torch.strided or name == "momentum_buffer"
    return dense and (value.is_floating_point() or not param.is_floating_point())


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.layout is torch.strided and not value.is_complex() and not value.is_meta
    return isinstance(value, (int, float)) and not isinstance(value, bool)
