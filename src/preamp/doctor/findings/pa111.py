"""PA111: float16 weights without masters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ...modules import CastingModule, is_norm
from ...policy import Policy
from ...report import Finding
from ..records import NOWHERE, Line
from .check import BY_SESSION, Check, on
from .events import Examined, FirstStep, WithoutMasters


class PA111(Check):
    """16-bit parameters that are stepped as they are; buffers and statistics that are 16-bit, or not finite."""

    errors = (
        (
            "Attempting to unscale FP16 gradients",
            "the parameters are float16: GradScaler wants float32 ones",
            "model = model.float()  # and torch.autocast for the computation; or preamp.prepare(model, optimizer, "
            "'O2')",
        ),
    )

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """Everything about the tensors that a model holds before its first step."""
        model, under = event.model, event.policy
        prepared = any(isinstance(module, CastingModule) for module in model.modules())
        if not (prepared and under.masters):
            yield from self._cast_by_hand(model, under)
            yield from self._unmastered(model, event.optimizer, under)
        yield from (*self._statistics(model), *self._not_finite(model))

    @on(FirstStep)
    def first_step(self, event: FirstStep) -> Iterator[Finding]:
        """The same of models whose policy is not known."""
        for model in event.names.models.values():
            yield from (*self._statistics(model), *self._not_finite(model))

    @on(WithoutMasters)
    def without_masters(self, event: WithoutMasters) -> Iterator[Finding]:
        """An optimizer of float16 parameters."""
        params = [p for group in event.optimizer.param_groups for p in group["params"]]
        half = [p for p in params if p.dtype is torch.float16]
        if half:
            names = [event.names.parameter(p)[1] for p in half]
            yield self._steps_halves(names, type(event.optimizer).__name__, event.names.common(half), event.at)

    def _steps_halves(self, names: Sequence[str], by: str | None, module: str | None, at: Line = NOWHERE) -> Finding:
        return self.finding(
            "warning",
            f"{by or 'the optimizer'} steps {_listed(names)} in float16, without float32 masters: an update below "
            "2**-12 of a weight changes nothing",
            "session = preamp.prepare(model.float(), optimizer, level='O2')  # float32 masters\n"
            f"{BY_SESSION}\n# or leave the model in float32, under torch.autocast",
            module=module,
            op=by,
            at=at,
            evidence={"parameters": len(names), "first": names[0], "dtype": "fp16", "masters": False},
        )

    def _cast_by_hand(self, model: nn.Module, under: Policy) -> Iterator[Finding]:
        """Parameters that are float16 already where the policy stores float32."""
        names = []
        for path, module in model.named_modules():
            norm_full = is_norm(module) and under.norms is not torch.float16
            if under.params is not torch.float16 or norm_full or kept_full(path, under):
                own = module.named_parameters(path, recurse=False)
                names += [name for name, p in own if p.dtype is torch.float16]
        if names:
            yield self.finding(
                "error",
                f"{_listed(names)} {'is' if len(names) == 1 else 'are'} already float16 and the policy keeps float32 "
                "there: updates below 2**-11 of a weight are lost, and prepare() refuses the model",
                "# remove model.half() or .to(torch.float16); the policy casts by itself:\n"
                "session = preamp.prepare(model.float(), optimizer, level='O2')",
                module=names[0].rpartition(".")[0],
                evidence={"parameters": len(names), "first": names[0], "dtype": "fp16"},
            )

    def _unmastered(self, model: nn.Module, optimizer: Optimizer | None, under: Policy) -> Iterator[Finding]:
        """An optimizer that steps float16 parameters directly, now or once the policy has cast them."""
        if under.params is not torch.float16 or under.masters:
            return
        if optimizer is None:
            stepped = {id(p) for p in model.parameters() if p.requires_grad}
        else:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [
            name
            for name, p in model.named_parameters()
            if id(p) in stepped and p.is_floating_point() and not kept_full(name.rpartition(".")[0], under)
        ]
        if names:
            kind = None if optimizer is None else type(optimizer).__name__
            yield self._steps_halves(names, kind, names[0].rpartition(".")[0])

    def _statistics(self, model: nn.Module) -> Iterator[Finding]:
        """Running statistics of norm layers that are not finite, or float16."""
        low: list[str] = []
        for path, module in model.named_modules():
            if not isinstance(module, _NormBase):
                continue
            given = {name: getattr(module, name) for name in ("running_mean", "running_var")}
            held = {name: t for name, t in given.items() if isinstance(t, Tensor)}
            broken = {name: _share_not_finite(t) for name, t in held.items() if not _is_finite(t)}
            if broken:
                yield self.finding(
                    "error",
                    f"{' and '.join(broken)} of a norm layer not finite: every evaluation from here on gives NaN",
                    f"{_spell(path)}.reset_running_stats()",
                    module=path,
                    evidence=broken,
                )
            if any(t.dtype is torch.float16 for t in held.values()):
                low.append(path)
        if low:
            first = low[0] or "the model"
            layers = first if len(low) == 1 else f"{first} and {len(low) - 1} more layers"
            yield self.finding(
                "error",
                f"the running statistics of {layers} are float16: a variance above 65504 is infinite, and small "
                "changes of an average are rounded away",
                f"{_spell(low[0])}.float()  # each of them; under a policy: norms=fp32",
                module=low[0],
                evidence={"layers": len(low), "first": low[0], "dtype": "fp16"},
            )

    def _not_finite(self, model: nn.Module) -> Iterator[Finding]:
        """Parameters that are not finite."""
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and not _is_finite(parameter):
                path, _, own = name.rpartition(".")
                yield self.finding(
                    "error",
                    f"the parameter {name} is not finite before the first step: every output it touches is NaN or inf",
                    "# load a sound checkpoint, or initialise it: a tensor from torch.empty holds whatever was there",
                    module=path,
                    evidence={own: _share_not_finite(parameter)},
                )


def _is_finite(tensor: Tensor) -> bool:
    # a lazy parameter has no numbers yet, a meta tensor never has
    return tensor.is_meta or is_lazy(tensor) or bool(torch.isfinite(tensor.detach()).all())


def _share_not_finite(tensor: Tensor) -> str:
    return f"{int((~torch.isfinite(tensor.detach())).sum())} of {tensor.numel()} not finite"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def _spell(path: str) -> str:
    return f"model.get_submodule({path!r})" if path else "model"


def kept_full(path: str, policy: Policy) -> bool:
    """Whether a rule of the policy keeps a module, or one around it, in float32."""
    parents = [path]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return any(
        precision == "full" and re.fullmatch(pattern, each) for pattern, precision in policy.modules for each in parents
    )
