"""PA102: the logarithm of a 16-bit sigmoid."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats import LOW_DTYPES, name_of
from ...report import Finding
from ..operators import Call, Observer
from .check import Check

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


class Sigmoids(Observer):
    """As it happens: a 16-bit sigmoid whose logarithm is taken, or a 16-bit binary cross entropy."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
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
            self.found.append(_saturating(dtype, call))
        elif gives and (base in _CARRIES or (base in ("add", "sub") and len(call.inputs) == 1)):
            self._rounded[out] = dtype


def _saturating(dtype: torch.dtype, call: Call) -> Finding:
    kind, info = name_of(dtype), torch.finfo(dtype)
    # 1 - sigmoid(x) is below half the distance to the next number under 1 from the first logit on; sigmoid(x) itself is
    # about exp(x), and below half of the smallest number from the second.
    top, bottom = math.log(4 / info.eps), math.log(info.smallest_normal * info.eps / 2)
    return PA102.finding(
        "error",
        f"a sigmoid in {kind} is exactly 1 for logits above {top:.1f} and 0 below {bottom:.1f}: its logarithm, or that "
        "of 1 minus it, is -inf there",
        _WITH_LOGITS,
        **call.place.where(f"sigmoid, {call.base}"),
        evidence={"dtype": kind, "saturates at logit": round(top, 1)},
    )
