"""What a shadowed step shows of one operator: where a value goes wrong that float32 would have got right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..places import Place
from ..records import Line

Kind = Literal["made", "lost", "decided", "not finite", "absorbed"]

OFF = 0.25
"""Relative error of a result, ||value - shadow|| / ||shadow||, from which it is one: far more than rounding."""
AGREES = 0.06
"""Relative error up to which an input counts as right: twice bfloat16's rounding, many times over."""
DECIDES = 0.02
"""Relative error up to which float32 gets a result right. What float32 gets wrong, no precision is to blame for."""
OTHERWISE = 0.1
"""Share of the entries of an index or mask that differ from the shadow's, from which they are decided otherwise."""
ZEROS = 0.5
"""Share of the entries that are zero and should not be, from which a result is lost to zero."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that went wrong at one operator."""

    kind: Kind
    op: str
    """As people write it: "log1p", "sqrt"."""
    place: Place
    dtype: str
    shape: tuple[int, ...]
    error: float
    """Relative error of the result; for "decided", "lost" and "absorbed" the share of entries."""
    inputs: float
    """Largest relative error of the inputs."""
    largest: float = 0.0
    """Largest magnitude among the inputs."""
    hidden_by: str | None = None
    """The operator that made finite numbers of something not finite, of a "not finite" that nothing else shows."""

    lines: tuple[Line, ...] = ()
    """The user's line, and those that led to what the operator reads, the nearest first."""

    @property
    def name(self) -> str:
        """The operator as people write it."""
        return spelled(self.op)

    @property
    def code(self) -> str:
        """Which finding it is."""
        if self.op.startswith(_MATRIX) and not self.op.startswith(_NO_MATRIX):
            return "PA115"
        if self.kind == "decided" or (self.op in _COUNTS and self.largest >= _LARGE[self.dtype]):
            return "PA114"
        return "PA201" if self.kind == "not finite" else "PA104"


_MATRIX = ("linalg_", "_linalg_", "cholesky", "inverse", "logdet", "slogdet", "det", "triangular_solve", "lu_")
_NO_MATRIX = ("linalg_vector_norm", "linalg_cross", "linalg_matmul", "linalg_vecdot", "detach")
_COUNTS = frozenset({"sin", "cos", "tan", "remainder", "fmod", "floor", "ceil", "round", "trunc", "frac"})
"""Operators for which the last unit of a large number matters."""
_LARGE = {"bf16": 64.0, "fp16": 512.0, "fp32": 64.0}
"""Magnitude from which 16 bits round such a number by a quarter or more. A float32 one came from 16 bits."""
_SPELLED = {"_to_copy": "a cast", "_softmax": "softmax", "_log_softmax": "log_softmax", "_unsafe_view": "view"}


def spelled(op: str) -> str:
    """An operator's name as people write it: log1p for "aten.log1p.default", cholesky for "linalg_cholesky_ex"."""
    name = op.removeprefix("aten.").partition(".")[0]
    if name in _SPELLED:
        return _SPELLED[name]
    name = name.strip("_").removeprefix("native_").removeprefix("linalg_").removesuffix("_ex")
    return name.removesuffix("_backward_data").removesuffix("_backward")


def relative_error(value: Tensor, shadow: Tensor) -> float:
    """||value - shadow|| / ||shadow||, L2; infinite where the value is not finite and the shadow is.

    0 for what has no numbers, or where the shadow itself is not finite.
    """
    if not value.numel():
        return 0.0
    size = float(torch.linalg.vector_norm(shadow))
    if not math.isfinite(size):
        return 0.0
    off = float(torch.linalg.vector_norm(value.detach().to(shadow.dtype) - shadow))
    if math.isnan(off):
        return math.inf
    return off / size if size else (0.0 if off == 0 else math.inf)


def share_differing(value: Tensor, shadow: Tensor) -> float:
    """Share of the entries that differ; 1 where not even the shapes agree."""
    if value.shape != shadow.shape:
        return 1.0
    return float((value != shadow).double().mean()) if value.numel() else 0.0


def share_lost(value: Tensor, shadow: Tensor) -> float:
    """Share of the shadow's entries that are not zero whose value is."""
    there = shadow != 0
    return float(((value == 0) & there).sum()) / max(int(there.sum()), 1)
