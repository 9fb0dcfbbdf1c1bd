"""What a shadowed step shows of one operator: where a value goes wrong that float32 would have got right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..exponents import Exponents
from ..records import NOWHERE, Line

if TYPE_CHECKING:  # a report is made by a process that needs no torch
    from torch import Tensor
    from torch.optim import Optimizer

    from ..places import Place

Kind = Literal["made", "lost", "decided", "not finite", "added up"]


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
    """Relative error of the result; of "decided" and "lost" the share of entries, of "added up" gradients' error."""
    inputs: float
    """Largest relative error of the inputs; of "added up" that of the results."""
    largest: float = 0.0
    """Largest magnitude among the inputs."""
    hidden_by: str | None = None
    """The operator that made finite numbers of something not finite, of a "not finite" that nothing else shows."""

    constant: float | None = None
    """A number in the call that 16 bits make zero or infinite."""
    lines: tuple[Line, ...] = ()
    """The user's line, and those that led to what the operator reads, the nearest first."""

    @property
    def name(self) -> str:
        """The operator as people write it."""
        return spelled(self.op)

    @property
    def off(self) -> str:
        """How wrong the result is, in words."""
        return f"off by {self.error:.0%}" if self.error < math.inf else "not zero, which it is in float32"

    @property
    def vanished(self) -> str:
        """What became of an epsilon, in words."""
        return f"the epsilon {self.constant:g} rounds to zero in {self.dtype}: after {self.name} a zero is still a zero"

    @property
    def code(self) -> str:
        """Which finding it is."""
        if self.constant is not None:
            return "PA101" if abs(self.constant) < 1 else "PA103"
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
_SPELLED = {
    "_to_copy": "a cast", "_softmax": "softmax", "_log_softmax": "log_softmax", "_unsafe_view": "view",
    "scalar_tensor": "where",
}  # fmt: skip


def spelled(op: str) -> str:
    """An operator's name as people write it: log1p for "aten.log1p.default", cholesky for "linalg_cholesky_ex"."""
    name = op.removeprefix("aten.").partition(".")[0]
    if name in _SPELLED:
        return _SPELLED[name]
    name = name.strip("_").removeprefix("native_").removeprefix("linalg_").removesuffix("_ex")
    return name.removesuffix("_backward_data").removesuffix("_backward")


@dataclass(slots=True)
class Absorbed:
    """What one line did to 16-bit tensors of one kind, beside what it would have done in float32."""

    op: str
    dtype: str
    place: Place
    optimizer: Optimizer | None = None
    """What stepped then."""
    is_gradient: bool = False
    """Whether autograd added to a gradient here."""
    is_weight: bool = False
    """Whether this is what an optimizer steps."""
    is_moment: bool = False
    """Whether these are second moments, and all that a step did to them; the storages are those of their weights."""
    goes_on: bool = True
    """Whether what it gave is known to have taken the place of what it was given, as it always has in place."""
    moved: int = 0
    """How many numbers would have moved in float32."""
    stayed: int = 0
    """How many of those did not."""
    times: int = 0
    """How often it ran."""
    in_vain: int = 0
    """How many times in a row, up to the last, nothing moved that would have moved in float32."""
    by: float | None = None
    """A constant that was added, or multiplied by."""
    adds_tensor: bool = False
    """Whether that was a tensor, or several numbers."""
    last: Callable[[], Tensor | None] = lambda: None
    """The tensor that it changed last, if it is alive."""
    storages: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Those of the tensors that it changed, as `places.key_of` gives them, each with its two counts."""
    error: float = 0.0
    """Largest relative error of a gradient that was added up here, against the sum in float32."""
    parameters: Sequence[Tensor] = ()
    """Those of the models among the tensors."""
    module: str | None = None
    """The innermost module that owns them."""
    buffer: str | None = None
    """The name of a buffer among them."""
    made_at: Line = NOWHERE
    """Where the optimizer was made, of one that is torch's."""
    step: int | None = None
    """The step in which it was seen."""

    def add(self, storage: int, moved: int, stayed: int) -> None:
        """Count one tensor: how many numbers move in float32, and how many of these stay what they are."""
        self.moved, self.stayed, self.times = self.moved + moved, self.stayed + stayed, self.times + 1
        if moved:
            self.in_vain = self.in_vain + 1 if stayed == moved else 0
        before = self.storages.get(storage, (0, 0))
        self.storages[storage] = before[0] + moved, before[1] + stayed

    def stands_still(self) -> bool:
        """Whether the last tensor, as it is now, would stay what it is."""
        tensor = self.last()
        return tensor is not None and self.by is not None and bool((tensor + self.by == tensor).all())

    @property
    def counts(self) -> bool:
        """Whether it is a counter: a whole number is added to one number."""
        return self.by is not None and self.by == round(self.by) != 0 and self.moved == self.times and self.op == "add"

    @property
    def at(self) -> Line:
        """The line to change: the optimizer's, or the one that changes numbers in place."""
        return self.made_at if self.made_at[0] is not None else self.place.at


class GradientSpread(NamedTuple):
    """One parameter's gradient beside its shadow."""

    module: str | None
    name: str
    """Of the parameter, with its module's path."""
    spread: Exponents
    """The magnitudes of the shadow, without the loss scale."""
    is_vector: bool
    lost: float
    """Share of the values that are not zero in the shadow and zero as they came."""
    relative: float
    """||gradient - shadow|| / ||shadow||, L2."""


class GradientsRead(NamedTuple):
    """Gradients that went through float16 with this loss scale on them."""

    rows: Sequence[GradientSpread]
    """The worst first."""
    scale: float
    highest: float
    """The largest loss scale of the run so far."""
