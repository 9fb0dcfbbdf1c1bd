"""PA205: values near the end of the range."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...formats import FP16
from ...report import Finding
from ..operators import Call, Observer
from ..places import UNINITIALISED
from .check import Check

NEAR_TOP = FP16.max / 4
"""Two bits below float16's largest number."""
_NO_RESULTS = UNINITIALISED | {"full", "fill"}


class PA205(Check):
    """Float16 results within two bits of the largest number."""


class Tops(Observer):
    """The largest result of each line of a module counts, and of what follows from it the first."""

    def __init__(self) -> None:
        self._tops: dict[Any, float] = {}
        self._by_line: dict[Any, Finding] = {}
        self.found = self._by_line.values()

    def after(self, call: Call) -> None:
        """Compare one result."""
        out = call.out if isinstance(call.out, Tensor) else None
        if out is None or out.dtype is not torch.float16 or not out.numel() or call.base in _NO_RESULTS:
            return
        if not any(t.dtype is torch.float16 for t in call.inputs):
            return  # a cast: the number is older than this line
        key, top = (call.place.module, call.place.at), float(out.abs().max())
        if top >= NEAR_TOP and FP16.max in {top, *(float(t.abs().max()) for t in call.inputs if t.numel())}:
            return  # torch.finfo(dtype).min as a mask: meant to be there
        if max(NEAR_TOP, self._tops.get(key, 0.0)) <= top <= FP16.max:
            room = round(math.log2(FP16.max / top), 2)
            self._tops[key] = top
            self._by_line[key] = PA205.finding(
                "warning",
                f"{call.base} gave {top:.5g} in float16, less than 2 bits below the largest number, 65504: a batch or "
                "a learning rate away from infinity",
                "x = x.float()  # before this line, or scale what it multiplies: attention by 1 / sqrt(d), sums by 1 / "
                "n",
                **call.place.where(call.base),
                evidence={"largest magnitude": top, "dtype": "fp16", "headroom in bits": room},
            )
