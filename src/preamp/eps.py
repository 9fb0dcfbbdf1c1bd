"""Epsilons that survive: does the number an optimizer adds to a denominator exist in the dtype it is added in?

Adam's default 1e-8 is below half of float16's smallest subnormal (2**-25), so in float16 it is 0 and no longer keeps a
denominator from being 0. In float32 state, which every level with masters or float32 parameters has, it is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .formats import format_of
from .policy import Policy

SAFE_FP16_EPS = 1e-4
"""What to write for float16 state: the next round number above its smallest normal, 2**-14 = 6.1e-5."""


@dataclass(frozen=True, slots=True)
class EpsRow:
    """One parameter group's epsilon: what it is, what it becomes in the dtype it is added in, and what to write."""

    group: int
    eps: float
    dtype: torch.dtype
    becomes: float
    verdict: str
    """"fine", "subnormal" (loses bits) or "zero" (vanishes)."""
    suggested: float

    @property
    def fine(self) -> bool:
        """Whether the epsilon keeps its full precision."""
        return self.verdict == "fine"

    @property
    def words(self) -> str:
        """What happens to it, as a verb."""
        what = {"zero": "rounds to zero", "subnormal": f"becomes the subnormal {self.becomes:.3g}", "fine": "is fine"}
        return what[self.verdict]

    def __str__(self) -> str:
        return f"param_groups[{self.group}]: eps={self.eps:g} {self.words} in {format_of(self.dtype).name}"


def safe_eps(optimizer: Optimizer, policy: Policy, *, apply: bool = False) -> tuple[EpsRow, ...]:
    """Check the epsilon of every parameter group of an optimizer under a policy.

    The dtype that counts is that of the arithmetic: float32 where the policy has masters or float32 parameters, and
    else that of the group's parameters, which is the dtype of its state. `fused=True` does not help: it adds in
    float32, but a second moment that vanished in float16 leaves the epsilon alone in the denominator.

    Args:
        optimizer: Any optimizer; groups without an epsilon (SGD) give no row.
        policy: What it is to train under.
        apply: Also write the suggested value into groups whose epsilon is not fine.

    >>> preamp.safe_eps(optimizer, preamp.policy("O3"), apply=True)
    """
    rows = []
    for index, group in enumerate(optimizer.param_groups):
        several = isinstance(group.get("eps"), (tuple, list))  # Adafactor: the first regularises squared gradients
        eps = group["eps"][0] if several else group.get("eps")
        if not isinstance(eps, (int, float)):
            continue
        dtype = _arithmetic(group, policy)
        row = eps_row(index, float(eps), dtype)
        if apply and not row.fine:
            group["eps"] = (row.suggested, *group["eps"][1:]) if several else row.suggested
            row = eps_row(index, row.suggested, dtype)
        rows.append(row)
    return tuple(rows)


def _arithmetic(group: dict[str, object], policy: Policy) -> torch.dtype:
    if "ns_steps" in group:  # Muon's bounds a norm from below, in the bfloat16 of its iteration
        return torch.bfloat16
    members: Any = group["params"]
    parameters = [p for p in members if p.is_floating_point()]
    if policy.masters or policy.params is torch.float32 or not parameters:
        return torch.float32
    # The group may mix 16-bit weights and float32 norms: the coarsest of them decides. Before prepare() the
    # parameters are still float32 and will be the policy's dtype.
    dtypes: set[torch.dtype] = {policy.params, *(p.dtype for p in parameters)}
    return max(dtypes, key=lambda dtype: format_of(dtype).smallest_subnormal)


def eps_row(group: int, eps: float, dtype: torch.dtype) -> EpsRow:
    """What an epsilon becomes in a dtype."""
    facts = format_of(dtype)
    becomes = float(torch.tensor(eps, dtype=torch.float64, device="cpu").to(dtype))
    if eps > 0 and becomes == 0:
        verdict = "zero"
    elif 0 < becomes < facts.smallest_normal:
        verdict = "subnormal"
    else:
        verdict = "fine"
    suggested = eps if verdict == "fine" else max(SAFE_FP16_EPS, facts.smallest_normal)
    return EpsRow(group, eps, dtype, becomes, verdict, suggested)
