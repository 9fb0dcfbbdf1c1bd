"""PA101: an epsilon that vanishes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from ...eps import safe_eps
from ...formats import name_of
from ...policy import Policy, policy
from ...report import Finding
from ...report.finding import Severity
from ..records import NOWHERE, Line
from ..shadow.facts import Fact
from .check import Check, on
from .events import Examined, WithoutMasters


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

    def told(self, fact: Fact) -> tuple[Severity, str]:
        """One that is added to a zero, or is the floor of one, and leaves it a zero."""
        return "error", fact.vanished
