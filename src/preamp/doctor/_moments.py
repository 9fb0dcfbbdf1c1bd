"""What PA211 is judged from: second moments kept in 16 bits, of which a step leaves most as they were.

Adam moves a second moment by 1 - beta2 of its distance to the squared gradient. With beta2 = 0.999 that is a thousandth
at the most on the way down, and bfloat16 tells numbers 0.4 % to 0.8 % apart: such a moment can rise, and never fall.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..formats import LOW_DTYPES, name_of
from ._finite import values_here

if TYPE_CHECKING:
    from ._watch import Watch

LOOKED_AT = 65536
"""Entries of a tensor that are compared before and after a step."""
FOLLOWED, TENSORS = 256, 16
"""Entries of a tensor whose moment is kept in float32 besides, from step to step, and of how many tensors."""

_BETAS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "exp_avg_sq": lambda group: group["betas"][1],
    "square_avg": lambda group: group["alpha"] if "alpha" in group else group["rho"],
}
"""What of a second moment a step keeps, by the name under which torch's optimizers and their kin have it."""


@dataclass(slots=True)
class _Moment:
    """One parameter's second moment."""

    parameter: weakref.ref[Tensor]
    name: str
    exact: Tensor | None
    """In float32, of the entries that are followed; None for a tensor that is not followed."""
    squares: Tensor | None = None
    """Of the gradients that are about to be stepped."""
    before: Tensor | None = None
    meant: Tensor | None = None
    """Which of the entries looked at have a gradient."""


class Moments:
    """Follows optimizers whose second moments are 16-bit. Those of preamp.optim are float32, or rounded by chance."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._of: weakref.WeakKeyDictionary[Optimizer, list[_Moment]] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer, close: bool) -> None:
        """The optimizer is about to step; `close`: in a step whose numbers are looked at."""
        if not optimizer.state or type(optimizer).__module__.startswith("preamp."):
            return
        if close or optimizer not in self._of:
            self._find(optimizer)
        for moment, parameter, value, group in self._live(optimizer):
            grad = parameter.grad
            moment.before = moment.meant = moment.squares = None
            if grad is None or grad.layout is not torch.strided:
                continue
            if close:
                moment.before = _part(value, LOOKED_AT).clone()
                moment.meant = _part(grad, LOOKED_AT) != 0
            if moment.exact is not None:
                moment.squares = _part(grad, FOLLOWED).float().square()
                if _changes_gradients(optimizer, group):
                    moment.exact = moment.squares = None

    def after(self, optimizer: Optimizer) -> None:
        """It has stepped: record what moved."""
        looked, unmoved, dtypes = [], [], []
        far: list[Tensor] = []
        for moment, parameter, value, group in self._live(optimizer):
            if moment.squares is not None and moment.exact is not None:
                moment.exact.lerp_(moment.squares, 1 - _BETAS[moment.name](group))
            if moment.before is None or moment.meant is None:
                continue
            same = (_part(value, LOOKED_AT) == moment.before) & moment.meant
            looked.append(torch.stack([same.sum(), moment.meant.sum()]).cpu())
            unmoved.append(parameter)
            dtypes.append(value.dtype)
            if moment.exact is not None:
                far.append(torch.stack([_part(value, FOLLOWED).float().sum(), moment.exact.sum()]).cpu())
            moment.before = moment.meant = None
        if not looked:
            return
        same_total = [(int(same), int(total)) for same, total in looked]
        stored, exact = torch.stack(far).sum(dim=0).tolist() if far else (None, None)
        file, line = self._watch.places.get(id(optimizer), (None, None))
        stuck = [p for p, (same, total) in zip(unmoved, same_total, strict=True) if 2 * same >= total > 0]
        self._watch.recorder.write(
            "moments", step=self._watch.step, optimizer=type(optimizer).__name__, file=file, line=line,
            module=self._watch.names.common(stuck), dtype=name_of(dtypes[0]),
            same=sum(same for same, _ in same_total), total=sum(total for _, total in same_total),
            stored=stored, exact=exact,
        )  # fmt: skip

    def _find(self, optimizer: Optimizer) -> None:
        known = {moment.parameter(): moment for moment in self._of.get(optimizer, [])}
        found: list[_Moment] = []
        for parameter, state in optimizer.state.items():
            name = next((name for name in _BETAS if name in state), None) if isinstance(state, dict) else None
            if name is None or not isinstance(state[name], Tensor) or state[name].dtype not in LOW_DTYPES:
                continue
            moment = known.get(parameter)
            if moment is None:
                exact = _part(state[name], FOLLOWED).float().clone() if len(found) < TENSORS else None
                moment = _Moment(weakref.ref(parameter), name, exact)
            found.append(moment)
        self._of[optimizer] = found

    def _live(self, optimizer: Optimizer) -> Iterator[tuple[_Moment, Tensor, Tensor, Mapping[str, Any]]]:
        moments = self._of.get(optimizer)
        if not moments:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for moment in moments:
            parameter = moment.parameter()
            value = None if parameter is None else optimizer.state.get(parameter, {}).get(moment.name)
            if parameter is not None and isinstance(value, Tensor) and id(parameter) in groups:
                yield moment, parameter, value, groups[id(parameter)]


def _changes_gradients(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the optimizer squares something else than the gradient as it lies there."""
    decoupled = group.get("decoupled_weight_decay", "W" in type(optimizer).__name__)
    return bool(group.get("weight_decay") and not decoupled) or getattr(optimizer, "grad_scale", None) is not None


def _part(tensor: Tensor, count: int) -> Tensor:
    """Every k-th value, `count` of them or a few more; k is odd, so as not to stay in one column."""
    values = values_here(tensor.detach()).reshape(-1)
    return values[:: max(1, values.numel() // count) | 1]
