"""The lint: all findings that can be had before the first step, and the fixes that are safe to apply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import SessionError
from ..policy import Policy
from ..report.document import Report
from ..report.finding import Finding
from ..tree import tensors
from ._lint_buffers import BufferWatcher
from ._lint_constants import ConstantWatcher, static_constants
from ._lint_eps import EpsWatcher, module_eps, optimizer_eps
from ._lint_observe import Watcher, observe
from ._lint_range import RangeWatcher, SigmoidWatcher, static_cross_entropy
from ._lint_shapes import ProductWatcher, not_in_effect, unaligned
from ._lint_state import state_findings
from ._lint_sums import SumWatcher
from ._lint_vanished import VanishedWatcher


@dataclass(frozen=True, slots=True)
class Linted:
    """Findings, most harmful first, and what the trial run showed."""

    findings: tuple[Finding, ...]
    flops: float | None
    """Of the matrix products and convolutions of one forward pass; None without a trial run."""
    low_share: float | None
    """The share of them that ran in 16 bits; None without a trial run or without products."""


def lint(
    model: nn.Module, optimizer: Optimizer | None, policy: Policy, example: Any = None, loss: Any = None
) -> Linted:
    """PA101 to PA105, PA109, PA111 and PA201, statically and, with an example, by one observed forward pass.

    `example`: a sequence of positional inputs or a mapping of keyword inputs. Raises `SessionError` for an example that
    does not run.
    """
    products = ProductWatcher()
    eps, constants, ranges, sigmoids = EpsWatcher(model), ConstantWatcher(), RangeWatcher(), SigmoidWatcher()
    sums, buffers, vanished = SumWatcher(), BufferWatcher(), VanishedWatcher()
    out_dtype: torch.dtype | None = None
    ran = example is not None
    if ran:
        watchers: tuple[Watcher, ...] = (eps, constants, ranges, sigmoids, sums, buffers, vanished, products)
        given = observe(model, policy, example, watchers)
        out_dtype = next((t.dtype for t in tensors(given) if t.is_floating_point()), None)
    found = [
        *eps.findings,
        *constants.findings,
        *ranges.findings,
        *sigmoids.findings,
        *sums.findings,
        *buffers.findings,
        *vanished.findings,
    ]
    if optimizer is not None:
        found += optimizer_eps(optimizer, policy)
    found += module_eps(model, policy, ran)
    found += static_constants(model, policy, ran)
    found += static_cross_entropy(model, loss, policy, out_dtype)
    found += state_findings(model, optimizer, policy)
    if ran:
        found += unaligned(products, model)
        found += not_in_effect(products, policy)
    return Linted(without_repeats(found), products.total if ran else None, products.low_share)


def without_repeats(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most harmful first; a line that runs in a loop, or a constant met twice there, is reported once."""
    kept: dict[tuple[Any, ...], Finding] = {}
    for each in sorted(findings):
        place = (each.file, each.line) if each.line is not None else (each.message,)
        kept.setdefault((each.code, each.module, each.op, *place), each)
    return tuple(kept.values())


def fix(
    report: Report | Iterable[Finding], model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> tuple[str, ...]:
    """Apply the findings that are safe to apply: epsilons of optimizer groups and of modules, in place.

    `report`: what `examine` returned, or findings of it. Nothing else is touched: an epsilon that has been changed
    since, a constant in the source, a dtype. Returns one line for each thing done. Raises `SessionError` when a finding
    is about an optimizer or module that is not given, or is not there.
    """
    findings = report.findings if isinstance(report, Report) else tuple(report)
    done = []
    for finding in findings:
        if not isinstance(finding, Finding):
            raise SessionError(f"fix() takes a report or findings of one; got a {type(finding).__name__}")
        if finding.code != "PA101" or not isinstance(finding.evidence, Mapping):
            continue
        evidence = finding.evidence
        if "group" in evidence:
            line = _fix_group(evidence, optimizer)
        elif evidence.get("attribute"):
            line = _fix_module(finding.module or "", evidence, model)
        else:
            line = None
        if line is not None:
            done.append(line)
    return tuple(done)


def _fix_group(evidence: Mapping[str, Any], optimizer: Optimizer | None) -> str | None:
    if optimizer is None:
        raise SessionError("a finding is about the optimizer's eps: give fix() the optimizer")
    index, old, new = evidence["group"], evidence["eps"], evidence["write"]
    if index >= len(optimizer.param_groups):
        raise SessionError(f"the optimizer has no parameter group {index}: it is not the one that was examined")
    group = optimizer.param_groups[index]
    eps = group.get("eps")
    if isinstance(eps, (tuple, list)):
        if eps[0] != old:
            return None
        group["eps"] = (new, *eps[1:])
    elif eps == old:
        group["eps"] = new
    else:
        return None
    return f"optimizer.param_groups[{index}]['eps']: {old:g} -> {new:g}"


def _fix_module(path: str, evidence: Mapping[str, Any], model: nn.Module | None) -> str | None:
    if model is None:
        raise SessionError(f"a finding is about the eps of module {path!r}: give fix() the model")
    name, old, new = evidence["attribute"], evidence["eps"], evidence["write"]
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise SessionError(f"the model has no module {path!r}: it is not the one that was examined") from None
    if getattr(module, name, None) != old:
        return None
    setattr(module, name, new)
    return f"{path + '.' if path else ''}{name}: {old:g} -> {new:g}"
