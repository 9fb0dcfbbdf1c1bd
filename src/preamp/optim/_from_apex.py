"""What Apex's fused optimizers saved, as those of `preamp.optim` have it; and options that a state does not name.

Apex counts steps by group, in `group["step"]`, and its FusedNovoGrad keeps running norms there: a list of two tensors,
for 16-bit parameters and for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import OptimizerError
from ..formats import LOW_DTYPES


def translated(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with a step count for each parameter, and with the optimizer's own options where it names none.

    `OptimizerError` for a run without bias correction that Adam would go on with one, and for norms of which it cannot
    be told whose they are.
    """
    states, groups = dict(state_dict["state"]), list(state_dict["param_groups"])
    for index, (own, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        group = dict(saved)
        if group.get("bias_correction") is False and "bias_correction" not in own:
            raise OptimizerError(
                f"the state was saved by an optimizer with bias_correction=False, and {type(optimizer).__name__} "
                "always corrects: its steps would be longer. Load it into preamp.compat.apex.optimizers.FusedAdam, "
                "which a session steps too"
            )
        known = [number for number in group["params"] if states.get(number)]
        norms = group.pop("exp_avg_sq", None)
        if norms is not None:
            for number, norm in zip(known, _each(norms, own["params"], known, group["params"]), strict=True):
                states[number] = {**states[number], "norm": norm}
        if "step" in group:
            count = float(group.pop("step"))
            for number in known:
                states[number] = {"step": torch.tensor(count), **states[number]}
        groups[index] = {**{name: value for name, value in own.items() if name not in group}, **group}
    return {**state_dict, "state": states, "param_groups": groups}


def _each(norms: Sequence[Any], params: Sequence[Tensor], known: Sequence[Any], numbers: Sequence[Any]) -> list[Tensor]:
    """The norms of the parameters that have states, out of those of 16-bit parameters and those of others."""
    low, full = (torch.as_tensor(kind, dtype=torch.float32).reshape(-1) for kind in norms)
    kinds = [param.dtype in LOW_DTYPES for param in params]
    if low.numel() and full.numel() and (low.numel(), full.numel()) == (sum(kinds), len(kinds) - sum(kinds)):
        left = {True: iter(low), False: iter(full)}
        every = [next(left[kind]) for kind in kinds]
    elif low.numel() and full.numel():
        every = []
    else:
        every = [*low, *full]
    if len(every) == len(numbers):
        held = set(known)
        return [norm for number, norm in zip(numbers, every, strict=True) if number in held]
    if len(every) == len(known):
        return every
    raise OptimizerError(
        f"the state holds running norms of {low.numel()} 16-bit and {full.numel()} other parameters, and the group has "
        f"{sum(kinds)} and {len(kinds) - sum(kinds)}: whose they are cannot be told. Load the state before prepare(), "
        "with parameters of the dtypes that they had"
    )
