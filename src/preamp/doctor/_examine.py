"""`examine`: what is wrong with a model's precision, before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import SessionError
from ..policy import Policy, auto_level
from ..policy import policy as make_policy
from ..report.document import Report, Section
from ..report.finding import Finding, count_severities
from ._lint import Linted, lint
from ._lint_observe import device_type_of


def examine(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    policy: Policy | str | Mapping[str, Any] = "auto",
    *,
    example: Any = None,
    loss: Any = None,
) -> Report:
    """Findings about a model, its optimizer and a policy, before the first step.

    `model`: not yet prepared, or prepared. `policy`: a level, a policy or its string; "auto" is the level that suits
    the model's device. `example`: inputs of one forward pass, as a tuple for positional or a mapping for keyword
    arguments, in the dtypes in which the training loop gives them; a tensor stands for a tuple of one. With it, the
    model runs once, on a copy, under the policy, and what is seen there is more precise than what the source tells.
    `loss`: the loss module or function, looked at and not called.

    The report's `findings` are PA101 to PA105, PA109 and PA111, most harmful first; a healthy model has no error and no
    warning. Nothing is changed: parameters, buffers, gradients, modes, random generators. Raises `SessionError` for
    something that is not a model, optimizer or example, or an example that does not run, and `PolicyError` for a policy
    that cannot be meant.

    >>> report = examine(model, optimizer, "O2", example=(batch,))
    >>> report.findings
    ()
    """
    _check_kinds(model, optimizer, loss)
    inputs = _inputs(example)
    chosen = _chosen(model, inputs, policy)
    return _report(model, chosen, lint(model, optimizer, chosen, inputs, loss))


def _check_kinds(model: Any, optimizer: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SessionError(f"examine() takes a torch.nn.Module; got a {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SessionError(f"optimizer= is a torch.optim.Optimizer or None; got a {type(optimizer).__name__}")
    if loss is not None and not callable(loss):
        raise SessionError(f"loss= is the loss module or function, which is not called; got a {type(loss).__name__}")


def _inputs(example: Any) -> Any:
    if example is None or isinstance(example, (tuple, list)):
        return example
    if isinstance(example, Tensor):
        return (example,)
    if isinstance(example, Mapping):
        if all(isinstance(key, str) for key in example):
            return example
        raise SessionError("example= as a mapping has the names of forward's arguments as keys")
    raise SessionError(
        f"example= is a tuple of inputs or a dict of keyword inputs; got a {type(example).__name__}: write "
        "example=(batch,)"
    )


def _chosen(model: nn.Module, inputs: Any, given: Any) -> Policy:
    if isinstance(given, str) and given.strip().lower() == "auto":
        return make_policy(auto_level(device_type_of(model, inputs))[0])
    return make_policy(given)


def _report(model: nn.Module, policy: Policy, linted: Linted) -> Report:
    name = policy.level or str(policy)
    environment = {
        "model": type(model).__name__,
        "policy": name,
        "device": device_type_of(model),
        "torch": torch.__version__,
    }
    data: dict[str, Any] = {}
    if linted.flops is None:
        summary = "Static only: with example= one forward pass would be observed too."
    else:
        data = {"flops": linted.flops, "low share of flops": linted.low_share}
        share = "none" if linted.low_share is None else f"{linted.low_share:.1%}"
        summary = f"One forward pass was observed; 16-bit share of the FLOPs of its matrix products: {share}."
    text = "" if linted.findings else "Nothing was found."
    section = Section("Findings", text, linted.findings)
    return Report(
        f"Examination of {type(model).__name__} under {name}",
        _verdict(linted.findings, name),
        (section,),
        summary=summary,
        environment=environment,
        data=data,
        status=None if any(f.severity != "info" for f in linted.findings) else "good",
    )


def _verdict(findings: tuple[Finding, ...], name: str) -> str:
    counts = count_severities(findings)
    said = [f"{n} {kind}{'s' if n > 1 and kind != 'info' else ''}" for kind, n in counts.items() if n]
    if not counts["error"] and not counts["warning"]:
        return f"Nothing speaks against {name}" + (f" ({said[0]})." if said else ".")
    worst = findings[0]
    where = f" in {worst.module}" if worst.module else ""
    return f"{', '.join(said)} under {name}; the worst is {worst.code}{where}: {worst.message}."
