"""PA201 of infinities that leave no trace: a root or a division makes zeros of them, and nothing is NaN or skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..report.finding import Finding
from ..tree import tensors
from ._lint_observe import Call, Watcher
from ._stack import Line

_MEANT = frozenset({
    "full", "full_like", "new_full", "fill", "masked_fill", "scalar_tensor", "index_fill", "constant_pad_nd", "where",
    "lift_fresh", "exp", "expm1",
})  # fmt: skip
"""Operators that write a constant, and those whose infinity a division rightly makes a zero: sigmoids
that are written by hand."""


@dataclass(frozen=True, slots=True)
class _Made:
    module: str | None
    op: str
    place: Line


class VanishedWatcher(Watcher):
    """Follows infinities that a float16 operator made out of finite numbers."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._made: Any = WeakTensorKeyDictionary()

    def after(self, call: Call) -> None:
        """Note one that is made or handed on, and report one that has become a zero."""
        outs = [t for t in tensors(call.out) if t.is_floating_point()]
        came = next((self._made[t] for t in call.inputs if t in self._made), None)
        if came is None and not any(t.dtype is torch.float16 for t in outs):
            return
        for out in outs:
            if bool(out.isinf().any()):
                if came is not None:
                    self._made[out] = came
                elif call.base not in _MEANT and all(bool(t.isfinite().all()) for t in call.inputs):
                    self._made[out] = _Made(call.module, call.base, call.place())
            elif came is not None and _divided(call) and not bool(out.isnan().any()) and bool((out == 0).any()):
                self._report(call, came)

    def _report(self, call: Call, came: _Made) -> None:
        file, line = came.place
        self.findings.append(
            Finding(
                "PA201",
                "error",
                f"{came.op} (forward) made inf out of finite float16 values, and {call.base} made zeros of it: nothing "
                "is NaN, no step is skipped, and what is multiplied by it vanishes",
                module=came.module,
                op=came.op,
                direction="forward",
                file=file,
                line=line,
                evidence={"dtype": "fp16", "made zero by": call.base},
                fix="x = x.float()  # before this line\n"
                "# or a norm of torch's (nn.RMSNorm, F.normalize) in a region of preamp's, which runs it in float32",
            )
        )


def _divided(call: Call) -> bool:
    """Whether the operator makes a zero of an infinity that it reads."""
    if call.base in ("rsqrt", "reciprocal"):
        return True
    if call.base == "pow":
        exponent = call.args[1] if len(call.args) > 1 else None
        return isinstance(exponent, (int, float)) and exponent < 0
    below = call.args[1] if call.base == "div" and len(call.args) > 1 else None
    return isinstance(below, Tensor) and bool(below.isinf().any())
