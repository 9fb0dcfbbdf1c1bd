"""The lint: all findings that can be had before the first step.

With an example, one forward pass is observed too: on a copy of the model, under the policy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import REGISTRY, autocast
from ..errors import PolicyError, SessionError, kind_of
from ..formats import LOW_DTYPES
from ..ledger import Masters, NoMasters
from ..machine import random_kept
from ..modules import CastingModule, Conversion
from ..policy import Policy, auto_level, cpu_arithmetic
from ..policy import policy as make_policy
from ..report import Finding, Report, Section
from ..tree import map_tensors, tensors
from .findings import one_of_each
from .findings.check import Check, Listeners, counted, without_repeats
from .findings.events import Deviated, Examined, Raised
from .hooks import Clock
from .names import Names
from .operators import Observer, Products, Stream
from .places import Places, raised_at
from .records import shown_path
from .replay.origin import Trails
from .shadow.execution import Shadowed


def examine(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    policy: Policy | str | Mapping[str, Any] = "auto",
    *,
    example: Any = None,
) -> Report:
    """Findings about a model, its optimizer and a policy, before the first step.

    With an example, the model runs once, on a copy, under the policy, and its operators are judged; without one, what
    the model holds. Nothing is changed: parameters, buffers, gradients, modes, random generators.

    Args:
        model: Not yet prepared, or prepared.
        optimizer: What steps it.
        policy: A level, a policy or its string; "auto" is the level that suits the model's device.
        example: Inputs of one forward pass, in the dtypes in which the training loop gives them: a tuple for positional
            arguments, a mapping for keyword arguments; a tensor stands for a tuple of one.

    Returns:
        A report. Its `findings` are PA101 to PA105, PA109, PA111, and PA201 or PA207 if the example's output has NaN or
            inf, most harmful first. A healthy model has no error and no warning.

    Raises:
        SessionError: For what is not a model, optimizer or example, or an example that does not run.
        PolicyError: For a policy that makes no sense.

    >>> report = examine(model, optimizer, "O2", example=(batch,))
    >>> report.findings
    ()
    """
    if not isinstance(model, nn.Module):
        raise SessionError(f"examine() takes a torch.nn.Module; got {kind_of(model)}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SessionError(f"optimizer= is a torch.optim.Optimizer or None; got {kind_of(optimizer)}")
    inputs = _inputs(example)
    if isinstance(policy, str) and policy.strip().lower() == "auto":
        policy = auto_level(_device_type_of(model, inputs))[0]
    chosen = make_policy(policy)
    found: list[Finding] = []
    products, ended = None, None
    if inputs is not None:
        products = Products()
        found, ended = _observe(model, chosen, inputs, products)
        products = products if ended is None else None
    Listeners(one_of_each(Check), found.append)(Examined(model, optimizer, chosen, products))
    findings = without_repeats(replace(one, file=shown_path(one.file, Path.cwd())) for one in found)
    return _report(model, chosen, findings, products, ended)


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
        f"example= is a tuple of inputs or a dict of keyword inputs; got {kind_of(example)}: write example=(batch,)"
    )


def _report(
    model: nn.Module, policy: Policy, findings: tuple[Finding, ...], products: Products | None, ended: Exception | None
) -> Report:
    name = policy.level or str(policy)
    kind, device = type(model).__name__, _device_type_of(model)
    data: dict[str, Any] = {}
    if ended is not None:
        summary = f"The example did not come to its end: {ended}."
    elif products is None:
        summary = "Static only: with example= one forward pass would be observed too."
    else:
        data = {"flops": products.flops, "low share of flops": products.low_share}
        share = "none" if products.low_share is None else f"{products.low_share:.1%}"
        summary = f"One forward pass was observed; 16-bit share of the FLOPs of its matrix products: {share}."
    if device == "cpu" and policy.compute in LOW_DTYPES:
        summary += f" {cpu_arithmetic()}"
    return Report(
        f"Examination of {kind} under {name}",
        _verdict(findings, name),
        (Section("Findings", "" if findings else "Nothing was found.", findings),),
        summary=summary,
        environment={"model": kind, "policy": name, "device": device, "torch": torch.__version__},
        data=data,
        status=None if any(f.severity != "info" for f in findings) else "good",
    )


def _verdict(findings: tuple[Finding, ...], name: str) -> str:
    if all(finding.severity == "info" for finding in findings):
        return f"Nothing speaks against {name}" + (f" ({counted(findings)})." if findings else ".")
    worst = findings[0]
    where = f" in {worst.module}" if worst.module else ""
    return f"{counted(findings)} under {name}; the worst is {worst.code}{where}: {worst.message}."


def _observe(
    model: nn.Module, policy: Policy, example: Any, products: Products
) -> tuple[list[Finding], Exception | None]:
    """Run `example` once through a copy of the model under the policy; what observers found, and its error.

    The model is not touched: the run is on a deep copy, with cloned inputs; random generators and the rules in torch's
    dispatcher are put back. Hooks of the model run on the copy. Raises `SessionError` if the copy cannot be made or
    the example ends by an error that is no finding.
    """
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    args, kwargs = map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs))
    with random_kept():
        try:
            twin = copy.deepcopy(model)
        except Exception as error:
            raise SessionError(f"the model cannot be copied for a trial run; leave out example=: {error}") from error
        prepared = any(isinstance(module, CastingModule) for module in twin.modules())
        if not prepared:
            _convert(twin, policy)
        device_type = _device_type_of(model, (args, kwargs))
        had_rules = bool(REGISTRY.stamp)
        names = Names({"": twin})
        names.search(())
        places = Places(names.known, names.owners, _called.__code__)
        found: list[Finding] = []
        report, trails = Listeners(one_of_each(Check), found.append), Trails(names.items())
        observers = [*one_of_each(Observer), products, trails, shadowed := Shadowed()]
        stream = Stream(lambda: places, Clock())
        region: Any = nullcontext()
        if policy.has_regions:
            region = autocast(device_type, dtype=policy.compute, rules=None if prepared else policy.ops)
        out, ended = None, None
        try:
            with region, torch.enable_grad(), stream.shown_to(*observers):
                out = _called(twin, args, kwargs)
        except PolicyError:
            raise
        except Exception as error:
            ended = error
        finally:
            if policy.has_regions and not had_rules:
                autocast.uninstall()
    origin = trails.origin_of(t for t in tensors(out) if _left_the_range(t))
    for fact in shadowed.facts:
        report(Deviated(fact))
    found += [finding for one in observers for finding in one.found]
    found += [] if origin is None else [origin.finding()]
    if ended is not None:
        module = names.raised_in(ended)
        report(Raised(type(ended).__name__, str(ended), raised_at(ended), module))
        # torch refuses a constant out of range, and a 16-bit binary cross entropy
        if not any(one.severity == "error" and one.code in ("PA102", "PA103") for one in found):
            inside = f" in module {module!r}" if module else ""
            raise SessionError(
                f"the example did not run through the model under {policy.level or policy}{inside}: "
                f"{type(ended).__name__}: {ended}"
            ) from ended
    return found, ended


def _left_the_range(tensor: Tensor) -> bool:
    """-inf does not count: it is what masks are made of."""
    return tensor.is_floating_point() and bool((tensor.isnan() | (tensor == torch.inf)).any())


def _called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call itself: where the search for the user's line stops."""
    return model(*args, **kwargs)


def _convert(twin: nn.Module, policy: Policy) -> None:
    """The copy under the policy. A model that does not fit (cast by hand) runs as it is; PA111 says why."""
    try:
        Conversion(twin, policy, Masters() if policy.masters else NoMasters())
    except PolicyError:
        if not any(p.dtype in LOW_DTYPES for p in twin.parameters()):
            raise


def _device_type_of(model: nn.Module, example: Any = None) -> str:
    """Where the model is: its first parameter's or buffer's device type, else that of the example, else the CPU."""
    for tensor in (*model.parameters(), *model.buffers(), *tensors(example)):
        return str(tensor.device.type)
    return "cpu"
