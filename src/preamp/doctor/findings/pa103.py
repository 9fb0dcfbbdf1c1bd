"""PA103: a constant beyond the range."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...formats import FP16
from ...modules import CastingModule, is_norm
from ...policy import Policy
from ...report import Finding
from .check import Check, on
from .events import Deviated, Examined

_ROUNDS_TO_INFINITY = FP16.max + 16
_FIX = "torch.finfo(x.dtype).min  # instead of the constant; or float('-inf') where no row is masked whole"


class PA103(Check):
    """Constants, buffers and parameters that float16 cannot hold."""

    errors = (("without overflow", "a constant is beyond float16, whose largest number is 65504", _FIX),)

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """Buffers and parameters that the policy casts to float16."""
        policy = event.policy
        prepared = any(isinstance(module, CastingModule) for module in event.model.modules())
        for path, module in event.model.named_modules():
            norm_full = is_norm(module) and policy.norms is not torch.float16
            if policy.params is torch.float16 and not prepared and not norm_full and not kept_full(path, policy):
                yield from self._of_tensors(path, module)

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """Constants that make infinities."""
        fact = event.fact
        if fact.code == "PA103":
            yield self.finding(
                "warning",
                f"the constant {fact.constant:g} is beyond float16, whose largest number is 65504, and becomes "
                "infinite here: 0 times that is NaN, and so is the softmax of a row that is masked whole",
                _FIX,
                **event.where,
                evidence={"value": fact.constant, "dtype": fact.dtype},
            )

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
