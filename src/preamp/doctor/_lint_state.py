"""PA111: float16 weights that nobody masters, and statistics that are float16 or broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..formats import LOW_DTYPES, format_of, name_of
from ..modules import CastingModule, is_norm, loses_nothing
from ..policy import Policy
from ..report.finding import Finding, Severity
from ._lint_constants import kept_full


def state_findings(model: nn.Module, optimizer: Optimizer | None, policy: Policy) -> Iterator[Finding]:
    """Everything about the tensors that a model holds before its first step."""
    prepared = any(isinstance(module, CastingModule) for module in model.modules())
    if not (prepared and policy.masters):
        yield from _cast_by_hand(model, policy)
        yield from _unmastered(model, optimizer, policy)
    yield from norm_statistics(model, policy)
    yield from _rounded_buffers(model, policy)
    yield from not_finite(model)


def _rounded_buffers(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    """Buffers that a policy without regions stores in 16 bits, whatever they hold; others keep those that matter."""
    if policy.params not in LOW_DTYPES or policy.has_regions:
        return
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.dtype is not torch.float32 or is_norm(module):
                continue
            if kept_full(path, policy) or loses_nothing(buffer, policy.params):
                continue
            dtype, exact = name_of(policy.params), buffer.detach()
            off = ((exact.to(policy.params).float() - exact).abs() / exact.abs()).nan_to_num(0.0).max().item()
            limit = round(2 / format_of(policy.params).epsilon)
            yield Finding(
                "PA111", "warning" if off else "info",
                f"the buffer {name} will be {dtype}"
                + (f" and up to {off:.1%} off: frequencies and positions turn that into large angles" if off else "")
                + f"; a count in it would stop at {limit}",
                module=path, evidence={"buffer": name, "dtype": dtype, "relative error": round(off, 5)},
                fix="session = preamp.prepare(model, optimizer, level='O2')  # keeps buffers that would be rounded",
            )  # fmt: skip


def _cast_by_hand(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    """Parameters that are float16 already where the policy stores float32."""
    names = []
    for path, module in model.named_modules():
        norm_full = is_norm(module) and policy.norms is not torch.float16
        full = policy.params is not torch.float16 or norm_full or kept_full(path, policy)
        if full:
            names += [
                f"{path}.{name}" if path else name
                for name, p in module.named_parameters(recurse=False)
                if p.dtype is torch.float16
            ]
    if names:
        yield Finding(
            "PA111",
            "error",
            f"{_listed(names)} already float16 and the policy keeps float32 there: updates below 2**-11 of a weight "
            "are lost, and prepare() refuses the model",
            module=names[0].rpartition(".")[0],
            evidence={"parameters": len(names), "first": names[0], "dtype": "fp16"},
            fix="# remove model.half() or .to(torch.float16); the policy casts by itself:\n"
            "session = preamp.prepare(model.float(), optimizer, level='O2')",
        )


def _unmastered(model: nn.Module, optimizer: Optimizer | None, policy: Policy) -> Iterator[Finding]:
    """An optimizer that steps float16 parameters directly, now or once the policy has cast them."""
    if policy.params is not torch.float16 or policy.masters:
        return
    if optimizer is None:
        stepped = {id(p) for p in model.parameters() if p.requires_grad}
    else:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [
        name
        for name, p in model.named_parameters()
        if id(p) in stepped and p.is_floating_point() and not kept_full(name.rpartition(".")[0], policy)
    ]
    if names:
        yield Finding(
            "PA111",
            "warning",
            f"the policy has float16 parameters and no masters: the optimizer steps {_listed(names, plain=True)} in "
            "float16, where an update below 2**-11 of a weight changes nothing",
            module=names[0].rpartition(".")[0],
            op=None if optimizer is None else type(optimizer).__name__,
            evidence={"parameters": len(names), "first": names[0], "dtype": "fp16", "masters": False},
            fix="session = preamp.prepare(model, optimizer, level='O2')  # or O3 with masters=yes",
        )


def norm_statistics(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    already: list[str] = []
    later: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, _NormBase):
            continue
        held = {name: t for name in ("running_mean", "running_var") if isinstance(t := getattr(module, name), Tensor)}
        broken = [name for name, t in held.items() if not _finite(t)]
        if broken:
            yield Finding(
                "PA111",
                "error",
                f"{' and '.join(broken)} of a norm layer not finite: every evaluation from here on gives NaN",
                module=path,
                evidence={name: f"{_bad(held[name])} of {held[name].numel()} not finite" for name in broken},
                fix=f"{f'model.get_submodule({path!r})' if path else 'model'}.reset_running_stats()",
            )
        if any(t.dtype is torch.float16 for t in held.values()):
            already.append(path)
        elif held and policy.params is policy.norms is torch.float16 and not kept_full(path, policy):
            later.append(path)
    if already:
        yield _low_statistics(already, "are", "error")
    if later:
        yield _low_statistics(later, "will be", "warning")


def _low_statistics(paths: Sequence[str], verb: str, severity: Severity) -> Finding:
    spelt = f"model.get_submodule({paths[0]!r})" if paths[0] else "model"
    return Finding(
        "PA111",
        severity,
        f"the running statistics of {_layers(paths)} {verb} float16: a variance above 65504 is infinite, and small "
        "changes of an average are rounded away",
        module=paths[0],
        evidence={"layers": len(paths), "first": paths[0], "dtype": "fp16"},
        fix=f"{spelt}.float()  # each of them; under a policy: norms=fp32",
    )


def _layers(paths: Sequence[str]) -> str:
    first = paths[0] or "the model"
    return first if len(paths) == 1 else f"{first} and {len(paths) - 1} more layers"


def not_finite(model: nn.Module) -> Iterator[Finding]:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not _finite(parameter):
            path, _, own = name.rpartition(".")
            yield Finding(
                "PA111",
                "error",
                f"the parameter {name} is not finite before the first step: every output it touches is NaN or inf",
                module=path,
                evidence={own: f"{_bad(parameter)} of {parameter.numel()} not finite"},
                fix="# load a sound checkpoint, or initialise it: a tensor from torch.empty holds whatever was there",
            )


def _finite(tensor: Tensor) -> bool:
    # a lazy parameter has no numbers yet, a meta tensor never has
    if tensor.is_meta or is_lazy(tensor):
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def _bad(tensor: Tensor) -> int:
    return int((~torch.isfinite(tensor.detach())).sum())


def _listed(names: Sequence[str], plain: bool = False) -> str:
    verb = "" if plain else (" is" if len(names) == 1 else " are")
    return f"{names[0]}{verb}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters{verb}"
