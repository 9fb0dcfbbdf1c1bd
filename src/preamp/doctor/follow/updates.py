"""What a step changed of an optimizer's 16-bit second moments.

Adam moves a second moment by 1 - beta2 of its distance to the squared gradient. With beta2 = 0.999 that is a thousandth
at the most on the way down, and neighbouring bfloat16 numbers are 0.4 % to 0.8 % apart: such a moment can rise, but
never fall.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...formats import LOW_DTYPES, name_of
from ..measure import values_here
from .run import Run

LOOKED_AT = 65536
"""Entries of a tensor that are compared before and after a step."""
FOLLOWED, TENSORS = 256, 16
"""Entries of a tensor whose moment is also kept in float32, from step to step, and of how many tensors."""
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
    """Squared gradients of the step that begins."""
    before: Tensor | None = None
    meant: Tensor | None = None
    """Which of the entries compared have a gradient."""


class Updates:
    """16-bit second moments before and after a step.

    Those of preamp.optim are not followed: they are float32, or rounded stochastically.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._moments: weakref.WeakKeyDictionary[Optimizer, list[_Moment]] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer, close: bool) -> None:
        """The optimizer is about to step; `close`: in a step whose numbers are compared."""
        if not optimizer.state or type(optimizer).__module__.startswith("preamp."):
            return
        if close or optimizer not in self._moments:
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
        """Record which moments moved."""
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
        (file, line), names = self._run.place_of(optimizer), self._run.names
        stuck = [p for p, (same, total) in zip(unmoved, same_total, strict=True) if 2 * same >= total > 0]
        self._run.recorder.write(
            "moments",
            step=self._run.step,
            optimizer=type(optimizer).__name__,
            file=file,
            line=line,
            module=names.common(stuck),
            dtype=name_of(dtypes[0]),
            same=sum(same for same, _ in same_total),
            total=sum(total for _, total in same_total),
            stored=stored,
            exact=exact,
        )

    def _find(self, optimizer: Optimizer) -> None:
        known = {moment.parameter(): moment for moment in self._moments.get(optimizer, [])}
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
        self._moments[optimizer] = found

    def _live(self, optimizer: Optimizer) -> Iterator[tuple[_Moment, Tensor, Tensor, Mapping[str, Any]]]:
        moments = self._moments.get(optimizer)
        if not moments:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for moment in moments:
            parameter = moment.parameter()
            value = None if parameter is None else optimizer.state.get(parameter, {}).get(moment.name)
            if parameter is not None and isinstance(value, Tensor) and id(parameter) in groups:
                yield moment, parameter, value, groups[id(parameter)]


def _changes_gradients(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the optimizer squares something other than the stored gradient."""
    decoupled = group.get("decoupled_weight_decay", "W" in type(optimizer).__name__)
    return bool(group.get("weight_decay") and not decoupled) or getattr(optimizer, "grad_scale", None) is not None


def _part(tensor: Tensor, count: int) -> Tensor:
    """Every k-th value, `count` of them or a few more; k is odd, so as not to stay in one column."""
    values = values_here(tensor.detach()).reshape(-1)
    return values[:: max(1, values.numel() // count) | 1]
