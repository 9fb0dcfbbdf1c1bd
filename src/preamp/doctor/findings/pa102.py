"""PA102: the logarithm of a 16-bit sigmoid."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats import LOW_DTYPES, name_of
from ...report import Finding
from ...report.finding import Severity
from ..operators import Call, Observer
from .check import Check, on
from .events import Examined

_CARRIES = frozenset({
    "_to_copy", "clamp", "clamp_min", "clamp_max", "rsub", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze",
    "select", "slice", "detach", "alias", "clone", "t", "transpose", "expand", "flatten", "permute",
})  # fmt: skip
"""Operators after which a sigmoid is still a sigmoid that has been rounded; add and sub with a constant join them."""
_WITH_LOGITS = "loss = F.binary_cross_entropy_with_logits(logits, target)  # BCEWithLogitsLoss; drop the sigmoid"


class PA102(Check):
    """Binary cross entropy of probabilities under a 16-bit compute dtype."""

    errors = tuple(
        (text, "binary cross entropy of probabilities in 16 bits is refused", _WITH_LOGITS)
        for text in ("unsafe to autocast", "binary_cross_entropy is banned in a 16-bit autocast region")
    )

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """BCELoss in the model or as the loss.

        An error where the model was seen to give 16-bit numbers, which a region refuses; else a warning: what is
        float32 by then may have been rounded before.
        """
        policy, loss = event.policy, event.loss
        if policy.compute not in LOW_DTYPES:
            return
        found: list[str] = []
        if loss is F.binary_cross_entropy:
            found = ["loss"]
        elif isinstance(loss, nn.Module):
            found = [
                f"loss.{path}" if path else "loss" for path, m in loss.named_modules() if isinstance(m, nn.BCELoss)
            ]
        where: list[tuple[str | None, str]] = [(None, name) for name in found]
        where += [(path, path) for path, part in event.model.named_modules() if isinstance(part, nn.BCELoss)]
        severity: Severity = "error" if policy.has_regions and event.out_dtype in LOW_DTYPES else "warning"
        for path, name in where:
            yield _saturating(
                policy.compute,
                severity,
                {"module": path, "op": "binary_cross_entropy"},
                prefix=f"{name or 'the model'} is a binary cross entropy of probabilities; ",
            )


class Sigmoids(Observer):
    """As it happens: a 16-bit sigmoid whose logarithm is taken, or a 16-bit binary cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self._rounded: Any = WeakTensorKeyDictionary()

    def after(self, call: Call) -> None:
        """Follow rounded sigmoids, and report the logarithm of one."""
        base, out = call.base, call.out
        gives = isinstance(out, Tensor) and out.is_floating_point()
        if base == "sigmoid" and gives and out.dtype in LOW_DTYPES:
            self._rounded[out] = out.dtype
            return
        first = next(iter(call.inputs), None)
        dtype = None if first is None else self._rounded.get(first)
        if dtype is None:
            return
        if base in ("log", "log2", "log10", "binary_cross_entropy"):
            self.findings.append(_saturating(dtype, "error", {**call.where, "op": f"sigmoid, {base}"}))
        elif gives and (base in _CARRIES or (base in ("add", "sub") and len(call.inputs) == 1)):
            self._rounded[out] = dtype


def _saturating(dtype: torch.dtype, severity: Severity, where: dict[str, Any], prefix: str = "") -> Finding:
    kind, info = name_of(dtype), torch.finfo(dtype)
    # 1 - sigmoid(x) is below half the distance to the next number under 1 from the first logit on; sigmoid(x) itself is
    # about exp(x), and below half of the smallest number from the second.
    top, bottom = math.log(4 / info.eps), math.log(info.smallest_normal * info.eps / 2)
    return PA102.finding(
        severity,
        f"{prefix}a sigmoid in {kind} is exactly 1 for logits above {top:.1f} and 0 below {bottom:.1f}: its logarithm, "
        "or that of 1 minus it, is -inf there",
        _WITH_LOGITS,
        **where,
        evidence={"dtype": kind, "saturates at logit": round(top, 1)},
    )
