"""PA101: an epsilon that vanishes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...eps import eps_row, safe_eps
from ...formats import FP16, name_of
from ...policy import Policy, policy
from ...report import Finding
from ...report.finding import Severity
from ..operators import Call, Observer
from ..records import NOWHERE, Line
from .check import Check, on
from .events import Examined, WithoutMasters

_ADDS = frozenset({"add", "clamp_min", "clamp", "maximum"})


class PA101(Check):
    """Epsilons of optimizers by the dtype of their state, and of modules by where they are added."""

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """What can be known before the first step."""
        if event.optimizer is not None:
            yield from self._of_optimizer(event.optimizer, event.policy)

    @on(WithoutMasters)
    def first_step(self, event: WithoutMasters) -> Iterator[Finding]:
        """An optimizer whose state has the dtype of its parameters."""
        half = any(p.dtype is torch.float16 for group in event.optimizer.param_groups for p in group["params"])
        yield from self._of_optimizer(event.optimizer, policy("O3" if half else "O0"), event.at)

    def _of_optimizer(self, optimizer: Optimizer, under: Policy, at: Line = NOWHERE) -> Iterator[Finding]:
        for row in safe_eps(optimizer, under):
            if row.fine:
                continue
            dtype = name_of(row.dtype)
            yield self.finding(
                "error" if row.verdict == "zero" else "warning",
                f"the optimizer's eps={row.eps:g} {row.words} in {dtype}, the dtype of its state: where a second "
                "moment is 0 the step divides by it",
                f"optimizer.param_groups[{row.group}]['eps'] = {row.suggested:g}\n"
                "# or keep float32 masters: preamp.prepare(model, optimizer, level='O2')",
                op=type(optimizer).__name__,
                at=at,
                evidence={"group": row.group, "eps": row.eps, "dtype": dtype, "becomes": row.becomes},
            )


class Epsilons(Observer):
    """Tiny constants added to, or taken as the floor of, a float16 tensor."""

    def before(self, call: Call) -> None:
        """Judge the constant of an addition or a lower bound."""
        if call.base not in _ADDS or len(call.args) < 2:
            return
        left, eps = call.args[0], _constant(call.args[1])
        row = None if eps is None else eps_row(0, eps, torch.float16)
        if row is None or row.fine or not isinstance(left, Tensor) or left.dtype is not torch.float16:
            return
        near = bool((left.detach().abs() < FP16.smallest_normal).any())
        severity: Severity = "info" if not near else "error" if row.verdict == "zero" else "warning"
        none = "" if near else ", and none came near it yet"
        self.findings.append(
            PA101.finding(
                severity,
                f"the epsilon {eps:g} is added in float16, where it {row.words}: a denominator of 0 stays 0{none}",
                "x = x.float()  # before the line that adds it; cast back with .to(dtype) after",
                **call.where,
                evidence={"eps": eps, "dtype": "fp16", "becomes": row.becomes},
            )
        )


def _constant(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and value.dtype in (torch.float32, torch.float64) else None
    return float(value) if isinstance(value, float) else None
