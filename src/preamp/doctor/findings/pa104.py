"""PA104: an operator that wants float32, in float16.

What it is. float16 keeps 11 bits of a number. From 1024 on its numbers are 1 apart, and from 2048 on 2 apart, so that
2048 + 1 = 2048. Cumulative sums, variances by E[x^2] - E[x]^2, powers and exponentials lose what they were to measure,
or pass 65504: exp(12) = 162755 does, and so does 256^2 = 65536. Sums are computed again in float32 from the same input,
and judged by the difference, in float16 and bfloat16: a sum, mean or variance that is 2 % off (torch adds up in float32
inside, so most are right to the last bit), a running sum that is a quarter of a term off, and whatever overflows.

Why it hurts. Nothing crashes. The result has a few right digits or none, and the loss settles higher than it should. Of
what overflowed, infinities are left, and later NaN.

The cure. Cast before the operator; a cast after it comes too late.

When it is harmless. Sums that are right to the last bit of their result, exponentials of what is never positive, and
softmax and norms, whose kernels compute in float32 inside: that torch's own autocast leaves their *results* in 16 bits
on a CPU is given as information. Of bfloat16, which has the range, only sums are reported: it keeps 8 bits.

See also: [rules](../rules.md), which operators preamp's regions run in float32; [PA206](PA206.md), when the loss shows
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats import FP16, LOW_DTYPES, name_of
from ...report import Finding
from ...tree import map_tensors
from ..operators import Call, Observer
from .check import Check, on
from .events import Deviated

_STEEP = frozenset({"exp", "expm1", "cosh", "sinh", "prod", "cumprod"})
_INSIDE_FULL = frozenset({
    "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "logsumexp",
})  # fmt: skip
"""Kernels that compute in float32 inside: only their result is rounded."""
OFF = 0.02
"""Relative error of a sum, mean or variance from which it is reported: five times bfloat16's rounding. torch adds up in
float32 inside, and so most sums in 16 bits are right to their last bit, however long they are."""
TERM = 0.25
"""Error of a running sum from which it is reported, in terms: then what was added can no longer be told from it."""
_SUMS = frozenset({"sum", "nansum", "mean", "var", "std", "prod"})
_SQUARES = frozenset({"pow", "square", "mul"})
_LARGEST = 1 << 24
"""Numbers of a tensor that is kept in float32 besides."""


class PA104(Check):
    """Operators whose float16 result overflows or loses bits; sums in any 16-bit dtype."""

    @on(Deviated)
    def deviated(self, event: Deviated) -> Iterator[Finding]:
        """A result that is far from float32's, of inputs that are right."""
        fact = event.fact
        if fact.code != "PA104":
            return
        off = f"loses {fact.error:.0%} of its result to zero" if fact.kind == "lost" else f"is off by {fact.error:.0%}"
        yield self.finding(
            "warning",
            f"{fact.name} in {fact.dtype} {off}, and its inputs are right to {fact.inputs:.1%}: float32 gets it right",
            event.fix_or("x = x.float()  # before this line"),
            **event.where,
            evidence=event.evidence,
        )

    @classmethod
    def of(cls, call: Call, message: str, broke: bool, evidence: dict[str, Any]) -> Finding:
        """For an operator whose result 16 bits spoil: an error where it is beyond their range (`broke`)."""
        return cls.finding(
            "error" if broke else "warning",
            message,
            "x = x.float()  # before this line\n"
            "# or train under O1 or O2, whose regions run it in float32: preamp.prepare(model, optimizer, level='O2')",
            **call.where,
            evidence=evidence,
        )


class Ranges(Observer):
    """Operators that leave float16's range. The numbers decide: exp of what is never positive is safe."""

    def after(self, call: Call) -> None:
        """Judge one call by its inputs and its result."""
        inputs = call.inputs
        out = next((t for t in (call.out if isinstance(call.out, (tuple, list)) else (call.out,)) if _float(t)), None)
        if not inputs or out is None or out.numel() == 0:
            return
        base, first = call.base, inputs[0]
        if base in _INSIDE_FULL and call.torchs_own and out.dtype in LOW_DTYPES:
            self._left_low(call, out.dtype)
        if first.dtype is not torch.float16 or out.dtype is not torch.float16:
            return
        if base in _STEEP and float(first.max()) > 0:
            self._warn(call, out, f"{base} in float16 overflows for ordinary inputs: exp(12) is already infinite")
        elif base == "pow" and _grows(call.args) and _strays(first, out):
            self._warn(call, out, "a power in float16: squares overflow above 255 and vanish below 2**-12.5")
        elif base in _INSIDE_FULL and _broke(first, out):
            self._warn(call, out, f"{base} gave a number beyond float16's range")

    def _warn(self, call: Call, out: Tensor, message: str) -> None:
        broke = _broke(call.inputs[0], out)
        evidence: dict[str, Any] = {
            "dtype": "fp16",
            "input range": _span(call.inputs[0]),
            "result range": _span(out),
            "overflowed here": broke,
        }
        self.findings.append(PA104.of(call, message, broke, evidence))

    def _left_low(self, call: Call, dtype: torch.dtype) -> None:
        name, kind = call.base.removeprefix("native_").lstrip("_"), call.inputs[0].device.type
        if kind == "cpu":
            message = (
                f"torch's own CPU autocast leaves {name} in {name_of(dtype)}; on CUDA, and in preamp's regions, it is "
                "float32"
            )
        else:
            message = (
                f"torch's own autocast leaves {name} in {name_of(dtype)} where that dtype is asked for, as "
                "cross_entropy does; in preamp's regions cross_entropy is float32"
            )
        fix = f"with preamp.autocast({kind!r}, dtype={dtype}): ...  # in place of torch.autocast"
        where = {**call.where, "op": name}
        self.findings.append(PA104.finding("info", message, fix, **where, evidence={"dtype": name_of(dtype)}))


def _float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _grows(args: tuple[Any, ...]) -> bool:
    """Whether a power leaves the range: an exponent above 1 or below -1, or one that is not known."""
    exponent = args[1] if len(args) > 1 else None
    return not isinstance(exponent, (int, float)) or abs(exponent) > 1


def _strays(given: Tensor, out: Tensor) -> bool:
    """Whether a power came within 4 bits of float16's largest number, or all of it fell below the normal ones."""
    if not bool(torch.isfinite(given).all()):
        return False
    top = float(out.abs().max())
    return not top <= FP16.max / 16 or 0 < top < FP16.smallest_normal


def _broke(given: Tensor, out: Tensor) -> bool:
    return bool(torch.isfinite(given).all()) and not bool(torch.isfinite(out).all())


def _span(tensor: Tensor) -> str:
    return f"{float(tensor.min()):.3g} to {float(tensor.max()):.3g}"


class Sums(Observer):
    """Computes sums again in float32. A variance that is written as a difference is followed from its squares on."""

    def __init__(self) -> None:
        super().__init__()
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
            largest = f"{torch.finfo(out.dtype).max:g}"
            message = f"a {call.base} over {terms} terms is beyond {dtype}'s largest number, {largest}"
        elif call.base == "cumsum":
            message = (
                f"a cumsum over {terms} terms in {dtype} is off by {error:.2g} terms: what is added gets lost in it"
            )
        elif call.base == "sub":
            message = f"a difference of means in {dtype}, as E[x^2] - E[x]^2 is, is {error:.0%} off"
        else:
            message = f"a {call.base} over {terms} terms in {dtype} is {error:.0%} off"
        evidence: dict[str, Any] = {"dtype": dtype, "terms": terms, "overflowed here": broke}
        evidence["error against float32"] = round(error, 4)
        evidence["in"] = "terms" if call.base == "cumsum" else "results"
        self.findings.append(PA104.of(call, message, broke, evidence))


def _is_square(call: Call) -> bool:
    if call.base == "pow":
        return len(call.args) > 1 and call.args[1] == 2
    return call.base == "square" or (len(call.inputs) == 2 and call.inputs[0] is call.inputs[1])


def _again(call: Call, wide: dict[int, Tensor]) -> Tensor:
    """Run the operator again on these tensors in place of its own."""
    function = getattr(getattr(torch.ops.aten, call.base), call.name.partition(".")[2] or "default")
    kwargs = {name: torch.float32 if value in LOW_DTYPES else value for name, value in call.kwargs.items()}
    with torch.no_grad():
        found: Tensor = function(*(map_tensors(lambda t: wide[id(t)], value) for value in call.args), **kwargs)
    return found
