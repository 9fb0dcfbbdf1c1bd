"""PA104 of sums: by how much a sum, a running sum or a variance in 16 bits differs from float32 of the same input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..formats import LOW_DTYPES, name_of
from ..report.finding import Finding
from ..tree import map_tensors
from ._lint_observe import Call, Watcher
from ._lint_range import in_low_precision

OFF = 0.02
"""Relative error of a sum, mean or variance from which it is reported: five times bfloat16's rounding. torch adds up in
float32 inside, and so most sums in 16 bits are right to their last bit, however long they are."""
TERM = 0.25
"""Error of a running sum from which it is reported, in terms: then what was added can no longer be told from it."""

_SUMS = frozenset({"sum", "nansum", "mean", "var", "std", "prod"})
_SQUARES = frozenset({"pow", "square", "mul"})
_LARGEST = 1 << 24
"""Numbers of a tensor that is kept in float32 besides."""


class SumWatcher(Watcher):
    """Computes sums again in float32. A variance that is written as a difference is followed from its squares on."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._exact: Any = WeakTensorKeyDictionary()
        """What a tensor would be in float32, and the version at which it would be that."""

    def after(self, call: Call) -> None:
        """Judge one call by its result."""
        out, inputs, base = call.out, call.inputs, call.base
        if not isinstance(out, Tensor) or out.dtype not in LOW_DTYPES or not inputs or not out.numel():
            return
        if "out" in call.kwargs or call.name.partition(".")[0].endswith("_"):
            return  # what it read is gone
        if any(t.dtype not in LOW_DTYPES for t in inputs) or max(t.numel() for t in inputs) > _LARGEST:
            return
        if base in _SUMS or base == "cumsum":
            exact = _again(call, {id(t): self._wide(t) for t in inputs})
            self._judge(call, out, exact)
            self._keep(out, exact)
        elif base in _SQUARES and _is_square(call):
            self._keep(out, self._wide(inputs[0]).square())
        elif base in ("mul", "sub") and len(inputs) == 2:
            wide = {id(t): kept for t in inputs if (kept := self._kept(t)) is not None}
            if len(wide) == len({id(t) for t in inputs}):
                exact = _again(call, wide)
                if base == "mul":
                    self._keep(out, exact)
                else:
                    self._judge(call, out, exact)

    def _keep(self, out: Tensor, exact: Tensor) -> None:
        if not out.is_inference():  # these have no version
            self._exact[out] = exact, out._version

    def _kept(self, tensor: Tensor) -> Tensor | None:
        exact, version = self._exact.get(tensor, (None, None))
        return exact if exact is not None and version == tensor._version else None

    def _wide(self, tensor: Tensor) -> Tensor:
        exact = self._kept(tensor)
        return tensor.float() if exact is None else exact

    def _judge(self, call: Call, out: Tensor, exact: Tensor) -> None:
        dtype, first = name_of(out.dtype), call.inputs[0]
        whole = bool(exact.isfinite().all()) and bool(first.isfinite().all())
        broke = whole and not bool(out.isfinite().all())
        if not whole:
            return
        measure = first.float() if call.base == "cumsum" else exact
        size = float(measure.square().mean().sqrt())
        error = float((out.float() - exact).square().mean().sqrt()) / size if size and not broke else 0.0
        if not broke and error < (TERM if call.base == "cumsum" else OFF):
            return
        terms = first.numel() // out.numel() if call.base != "cumsum" else first.shape[call.args[1]]
        if broke:
            said = (
                f"a {call.base} over {terms} terms is beyond {dtype}'s largest number, {torch.finfo(out.dtype).max:g}"
            )
        elif call.base == "cumsum":
            said = f"a cumsum over {terms} terms in {dtype} is off by {error:.2g} terms: what is added gets lost in it"
        elif call.base == "sub":
            said = f"a difference of means in {dtype}, as E[x^2] - E[x]^2 is, is {error:.0%} off"
        else:
            said = f"a {call.base} over {terms} terms in {dtype} is {error:.0%} off"
        evidence = {
            "dtype": dtype, "terms": terms, "overflowed here": broke, "error against float32": round(error, 4),
            "in": "terms" if call.base == "cumsum" else "results",
        }  # fmt: skip
        self.findings.append(in_low_precision(call, said, broke, evidence))


def _is_square(call: Call) -> bool:
    if call.base == "pow":
        return len(call.args) > 1 and call.args[1] == 2
    return call.base == "square" or (len(call.inputs) == 2 and call.inputs[0] is call.inputs[1])


def _again(call: Call, wide: dict[int, Tensor]) -> Tensor:
    """The same operator on these tensors in place of its own."""
    function = getattr(getattr(torch.ops.aten, call.base), call.name.partition(".")[2] or "default")
    kwargs = {name: torch.float32 if value in LOW_DTYPES else value for name, value in call.kwargs.items()}
    with torch.no_grad():
        found: Tensor = function(*(map_tensors(lambda t: wide[id(t)], value) for value in call.args), **kwargs)
    return found
