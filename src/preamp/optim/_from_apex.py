"""Saved states whose groups lack options, and those of Apex's fused optimizers, in the form that preamp.optim has.

Apex counts steps once for a group, in `group["step"]`, and keeps NovoGrad's running norms in `group["exp_avg_sq"]`: two
tensors, of the 16-bit parameters and of the others. Arguments that it does not save are those of the present optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError, kind_of
from ..formats import LOW_DTYPES

_NEUTRAL = {"bias_correction": True, "grad_averaging": True, "max_grad_norm": 0.0}
"""Options of Apex's groups, each with the value with which an optimizer without that option steps."""

Row = dict[str, Any]


def completed(optimizer: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict whose groups have all options of the optimizer, and whose parameters have step counts of their own.

    The one that is given stays as it is. `OptimizerError` for what this optimizer cannot continue.
    """
    check_form(state_dict)
    states, groups = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
    for number, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):  # torch counts them
        kept = {key: states[key] for key in group["params"] if isinstance(states.get(key), Mapping)}
        rows: dict[Any, Row] = {key: dict(row) for key, row in kept.items()}
        step = None
        if "step" in group and "step" not in own and optimizer.counts_steps:
            step = _count(group.pop("step"))
            for row in filter(None, rows.values()):
                row.setdefault("step", torch.tensor(step))
        if "exp_avg_sq" in group and "exp_avg_sq" not in own:
            found = [rows.get(key, {}) for key in group["params"]]
            _give_norms(optimizer, group.pop("exp_avg_sq"), found, [p.dtype for p in own["params"]])
        _refuse_foreign(optimizer, number, own, group, step)
        group.update({name: own[name] for name in optimizer.defaults if name in own and name not in group})
        states.update(rows)
    return {**state_dict, "state": states, "param_groups": groups}


def check_form(state_dict: Any) -> None:
    """`OptimizerError` for what has not the form of an optimizer's state_dict: states by parameter, and groups."""
    state_dict = state_dict if isinstance(state_dict, Mapping) else {}
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        raise OptimizerError(
            "this is no state_dict of an optimizer, which has a dict of states by parameter under 'state' and a list "
            "of groups under 'param_groups'"
        )
    numbers: list[Any] = []
    for group in groups:
        own = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(own, (list, tuple)) or not all(isinstance(number, (int, str)) for number in own):
            raise OptimizerError("a saved group of parameters is no dict with a list of their numbers under 'params'")
        numbers += own
    known = set(numbers)
    if unowned := [key for key in states if isinstance(key, int) and key not in known]:
        raise OptimizerError(f"there are states for {unowned!r:.80}, which no saved group has among its parameters")
    for key in numbers:
        if not isinstance(row := states.get(key, {}), Mapping):
            raise OptimizerError(f"the states saved for a parameter are {kind_of(row)}, not a dict")


def _count(step: Any) -> float:
    if isinstance(step, (int, float)) or (isinstance(step, Tensor) and step.numel() == 1):
        return float(step)
    seen = f"a tensor of shape {tuple(step.shape)}" if isinstance(step, Tensor) else kind_of(step)
    raise OptimizerError(f"the group's 'step' is {seen}, and counts the steps of its parameters: write a number")


def _refuse_foreign(optimizer: Any, number: int, own: Row, group: Row, step: float | None) -> None:
    for name, neutral in _NEUTRAL.items() if "bias_correction" in group else ():  # else such a name is the user's
        value = group.get(name, neutral)
        if name in optimizer.defaults or bool(value) == bool(own.get(name, neutral)):
            continue
        if name == "bias_correction" and step is not None and max(group.get("betas", (1.0,))) ** (step + 1) < 2**-25:
            continue  # the correction is 1 from here on
        raise OptimizerError(
            f"the saved group {number} has {name}={value!r}, and {type(optimizer).__name__} has no such option: it "
            f"would step as with {neutral!r}, and the run would go on differently. Load it into an optimizer of the "
            "kind that saved it (preamp.compat.apex.optimizers has those of Apex, and a session takes them); if the "
            f"difference is meant, write state_dict['param_groups'][{number}][{name!r}] = {neutral!r} before"
        )


def _give_norms(optimizer: Any, saved: Any, rows: Sequence[Row], dtypes: Sequence[torch.dtype]) -> None:
    """Give each parameter its running norm out of the lists of its group."""
    if "norm" not in optimizer.kept:
        raise OptimizerError(
            "the saved group has running norms, of NovoGrad, where others have second moments of each parameter: "
            f"{type(optimizer).__name__} would start from zeros. Load it into preamp.optim.NovoGrad"
        )
    norms = [torch.zeros(0) if each is None else each for each in saved] if isinstance(saved, (list, tuple)) else []
    if len(norms) != 2 or not all(isinstance(each, Tensor) for each in norms):
        raise OptimizerError(
            f"the group's 'exp_avg_sq' is {kind_of(saved)}, and Apex's FusedNovoGrad has two tensors there, the norms "
            "of the 16-bit parameters and of the others: give it those, or norms as the state 'norm' of each parameter"
        )
    places = _places([each.numel() for each in norms], rows, dtypes)
    if places is None:
        raise OptimizerError(
            f"the group's 'exp_avg_sq' holds norms of {[each.numel() for each in norms]} 16-bit and other parameters, "
            f"and {len(rows)} were saved: which norm is whose cannot be told. Load it before the dtypes of "
            "parameters change, with the parameters in the order in which they were"
        )
    for own, each in zip(places, norms, strict=True):
        for i, norm in zip(own, each.reshape(-1).unbind(), strict=True):
            if "exp_avg" in rows[i]:
                rows[i].setdefault("norm", norm.clone())


def _places(sizes: list[int], rows: Sequence[Row], dtypes: Sequence[torch.dtype]) -> list[list[int]] | None:
    """The positions of the parameters of each list: of those that have started, as Apex saves it, or of all."""
    saved = [getattr(row.get("exp_avg"), "dtype", None) for row in rows]
    kinds: tuple[Callable[[int], bool], ...] = (
        lambda i: saved[i] in LOW_DTYPES,  # as the parameters were; in Apex the first moments are like them
        lambda i: i < len(dtypes) and dtypes[i] in LOW_DTYPES,
        lambda i: sizes[1] == 0,  # all are of one kind, whatever they are now
    )
    for members in ([i for i, dtype in enumerate(saved) if dtype is not None], list(range(len(rows)))):
        for is_low in kinds:
            found = [[i for i in members if is_low(i)], [i for i in members if not is_low(i)]]
            if [len(each) for each in found] == sizes:
                return found
    return None
