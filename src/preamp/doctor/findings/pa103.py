"""PA103: a constant beyond the range."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...formats import FP16
from ...modules import CastingModule, is_norm
from ...policy import Policy
from ...report import Finding
from ...report.finding import Severity
from ..operators import Call, Observer
from .check import Check, on
from .events import Examined

_ROUNDS_TO_INFINITY = FP16.max + 16
_FIX = "torch.finfo(x.dtype).min  # instead of the constant; or float('-inf') where no row is masked whole"

# Positions of the constants.
_PLACES: dict[str, tuple[int, ...]] = {
    "masked_fill": (2,), "where": (1, 2), "fill": (1,), "full": (1,), "full_like": (1,), "new_full": (2,),
    "scalar_tensor": (0,), "add": (1,), "sub": (1,), "rsub": (1,), "mul": (1,), "index_put": (2,), "index_fill": (3,),
    "scatter": (3,), "constant_pad_nd": (2,), "clamp": (1, 2), "clamp_min": (1,), "clamp_max": (1,),
}  # fmt: skip
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max"})
_REFUSED = _BOUNDS | {"masked_fill", "fill", "full", "full_like", "new_full", "index_fill", "scatter"}
"""torch raises: the value cannot be converted to float16 without overflow."""


class PA103(Check):
    """Constants, buffers and parameters that float16 cannot hold."""

    errors = (
        (
            "without overflow",
            "a constant is beyond float16, whose largest number is 65504",
            "torch.finfo(x.dtype).min  # instead of the constant",
        ),
    )

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """Buffers and parameters that the policy casts to float16."""
        policy = event.policy
        prepared = any(isinstance(module, CastingModule) for module in event.model.modules())
        for path, module in event.model.named_modules():
            norm_full = is_norm(module) and policy.norms is not torch.float16
            if policy.params is torch.float16 and not prepared and not norm_full and not kept_full(path, policy):
                yield from self._of_tensors(path, module)

    def _of_tensors(self, path: str, module: nn.Module) -> Iterator[Finding]:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if is_lazy(tensor) or tensor.dtype is not torch.float32 or tensor.is_meta or not tensor.numel():
                continue
            top = float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max())
            if beyond(top):
                yield self.finding(
                    "error",
                    f"{name} holds {top:g}, which the policy casts to float16, whose largest number is 65504: it "
                    "becomes inf, and inf times 0 is NaN",
                    f"# keep this module full: policy + '; {re.escape(path) or '(?:)'} -> full', or write\n# {_FIX}",
                    module=path,
                    evidence={"tensor": name, "largest magnitude": top, "dtype": "fp16", "becomes": "inf"},
                )


class Constants(Observer):
    """Constants out of range that meet a float16 tensor."""

    def before(self, call: Call) -> None:
        """Report the constant."""
        if call.base not in _PLACES or _result_dtype(call) is not torch.float16:
            return
        if call.base in _BOUNDS and any(t.device.type != "cpu" for t in call.inputs):
            return  # only the CPU's kernel converts the bound; elsewhere one out of range bounds nothing
        for key in _PLACES[call.base]:
            value = _constant(call.args[key] if key < len(call.args) else None)
            if value is None or not beyond(value):
                continue
            self.findings.append(_of_constant(call, value))


def beyond(value: float) -> bool:
    """Whether a finite number is infinite in float16."""
    return math.isfinite(value) and abs(value) >= _ROUNDS_TO_INFINITY


def kept_full(path: str, policy: Policy) -> bool:
    """Whether a rule of the policy keeps a module, or one around it, in float32."""
    parents = [path]
    while parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return any(
        precision == "full" and re.fullmatch(pattern, each) for pattern, precision in policy.modules for each in parents
    )


def _result_dtype(call: Call) -> torch.dtype | None:
    dtype = call.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        return dtype
    arrays = [t.dtype for t in call.inputs if t.dim() > 0]
    if not arrays:
        return None
    return torch.float16 if all(d is torch.float16 for d in arrays) else torch.float32


def _constant(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 and value.is_floating_point() else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _of_constant(call: Call, value: float) -> Finding:
    severity: Severity = "warning"
    hurts = "a row that is masked whole becomes NaN in a softmax"
    becomes = f"{math.copysign(math.inf, value)}"
    if call.base in _REFUSED:
        severity, becomes = "error", "a RuntimeError: the value cannot be converted to float16"
        hurts = "the step fails"
    elif call.base == "mul":
        severity, hurts = "error", "times 0 it is NaN"
    elif call.base != "where":
        hurts = "everything it touches is infinite"
    return PA103.finding(
        severity,
        f"the constant {value:g} is beyond float16, whose largest number is 65504; it becomes {becomes}: {hurts}",
        _FIX,
        **{**call.where, "op": "where" if call.base == "scalar_tensor" else call.base},
        evidence={"value": value, "dtype": "fp16", "becomes": becomes},
    )
