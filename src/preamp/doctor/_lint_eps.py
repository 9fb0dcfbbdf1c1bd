"""PA101: epsilons that vanish in the dtype in which they are added."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..eps import SAFE_FP16_EPS, safe_eps
from ..formats import FP16, name_of
from ..modules import NORMS
from ..policy import Policy
from ..report.finding import Finding, Severity
from ._lint_observe import Call, Watcher, shown_path

EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
"""Attributes in which modules keep an epsilon."""

_ADDS = frozenset({"add", "clamp_min", "clamp", "maximum"})


def in_fp16(value: float) -> float:
    """What a number becomes in float16."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(torch.float16))


def vanishes(value: float) -> str | None:
    """How a positive number is lost in float16: "rounds to zero", "becomes the subnormal ...", or None: it is not."""
    if not 0 < value < FP16.smallest_normal:
        return None
    becomes = in_fp16(value)
    return "rounds to zero" if becomes == 0 else f"becomes the subnormal {becomes:.3g}"


def optimizer_eps(optimizer: Optimizer, policy: Policy) -> Iterator[Finding]:
    """Epsilons of parameter groups, judged by `safe_eps`; nothing about float32 state."""
    for row in safe_eps(optimizer, policy):
        if row.fine:
            continue
        zero = row.verdict == "zero"
        lost = "rounds to zero" if zero else f"becomes the subnormal {row.becomes:.3g}"
        yield Finding(
            "PA101",
            "error" if zero else "warning",
            f"the optimizer's eps={row.eps:g} {lost} in {name_of(row.dtype)}, the dtype of its state: "
            "where a second moment is 0 the step divides by it",
            op=type(optimizer).__name__,
            evidence={
                "group": row.group, "eps": row.eps, "dtype": name_of(row.dtype), "becomes": row.becomes,
                "write": row.suggested,
            },
            fix=f"optimizer.param_groups[{row.group}]['eps'] = {row.suggested:g}\n"
            "# or keep float32 masters: preamp.prepare(model, optimizer, level='O2')",
        )  # fmt: skip


def module_eps(model: nn.Module, policy: Policy, ran: bool) -> Iterator[Finding]:
    """Epsilons of modules that are not torch's, where float16 parameters make float16 arithmetic likely.

    Without an example only the source can be asked: a forward that mentions float32 is taken to compute in it. With
    one, the observation decides, and this says nothing. torch's own norms compute in float32 inside.
    """
    if ran:
        return
    for path, module in model.named_modules():
        if isinstance(module, NORMS) or type(module).__module__.startswith("torch."):
            continue
        by_hand = any(p.dtype is torch.float16 for p in module.parameters(recurse=False))
        if not (by_hand or policy.params is torch.float16) or _upcasts(module):
            continue
        for name in EPS_NAMES:
            eps = module.__dict__.get(name)
            lost = vanishes(eps) if isinstance(eps, float) else None
            if lost is None:
                continue
            file, line = class_place(module)
            yield _finding(path, name, eps, lost, "add", file, line, sure=False)


class EpsWatcher(Watcher):
    """Tiny constants added to, or taken as the floor of, a float16 tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.findings: list[Finding] = []

    def before(self, call: Call) -> None:
        """Judge the constant of an addition or a lower bound."""
        if call.base not in _ADDS or len(call.args) < 2:
            return
        left = call.args[0]
        eps = _constant(call.args[1])
        if not isinstance(left, Tensor) or left.dtype is not torch.float16 or eps is None:
            return
        lost = vanishes(eps)
        if lost is None:
            return
        attributes = self._modules[call.module].__dict__ if call.module in self._modules else {}
        name = next((key for key in EPS_NAMES if attributes.get(key) == eps), None)
        self.findings.append(_finding(call.module, name, eps, lost, call.base, *call.place(), sure=True))


def _constant(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and value.dtype in (torch.float32, torch.float64) else None
    return float(value) if isinstance(value, float) else None


def _finding(
    path: str | None,
    name: str | None,
    eps: float,
    lost: str,
    op: str,
    file: str | None,
    line: int | None,
    *,
    sure: bool,
) -> Finding:
    what = f"{name}={eps:g}" if name else f"the epsilon {eps:g}"
    severity: Severity = "error" if sure and in_fp16(eps) == 0 else "warning"
    does = "is added in float16, where it" if sure else "will be added in float16 unless forward() upcasts; there it"
    spelt = f"model.get_submodule({path!r})" if path else "model"
    upcast = "x = x.float()  # before the line that adds it; cast back with .to(dtype) after"
    return Finding(
        "PA101",
        severity,
        f"{what} {does} {lost}: a denominator of 0 stays 0",
        module=path,
        op=op,
        direction="forward",
        file=file,
        line=line,
        evidence={"attribute": name, "eps": eps, "dtype": "fp16", "becomes": in_fp16(eps), "write": SAFE_FP16_EPS},
        fix=f"{spelt}.{name} = {SAFE_FP16_EPS:g}\n# or\n{upcast}" if name else upcast,
    )


def _upcasts(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and bool({"float", "float32"} & set(code.co_names))


def class_place(module: nn.Module) -> tuple[str | None, int | None]:
    """File and line of a module's class; (None, None) where there is no source."""
    try:
        file = inspect.getsourcefile(type(module))
        return (None, None) if file is None else (shown_path(file), inspect.getsourcelines(type(module))[1])
    except (OSError, TypeError):
        return None, None
