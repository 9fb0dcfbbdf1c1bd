"""PA104: operators that leave float16's range or lose its bits. PA102: logarithms of a 16-bit sigmoid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..formats import FP16, LOW_DTYPES, name_of
from ..policy import Policy
from ..report.finding import Finding, Severity
from ._lint_observe import Call, Watcher

_STEEP = frozenset({"exp", "expm1", "cosh", "sinh", "prod", "cumprod"})
_INSIDE_FULL = frozenset({
    "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "logsumexp",
})  # fmt: skip
"""Kernels that compute in float32 inside: only their result is rounded."""


class RangeWatcher(Watcher):
    """PA104. The run's numbers decide where they can: exp of what is never positive is safe."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

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
        self.findings.append(in_low_precision(call, message, broke, evidence))

    def _left_low(self, call: Call, dtype: torch.dtype) -> None:
        file, line = call.place()
        name, kind = call.base.removeprefix("native_").lstrip("_"), call.inputs[0].device.type
        self.findings.append(
            Finding(
                "PA104",
                "info",
                f"torch's own CPU autocast leaves {name} in {name_of(dtype)}; on CUDA, and in preamp's regions, it is "
                "float32"
                if kind == "cpu"
                else f"torch's own autocast leaves {name} in {name_of(dtype)} where that dtype is asked for, as "
                "cross_entropy does; in preamp's regions cross_entropy is float32",
                module=call.module,
                op=name,
                direction="forward",
                file=file,
                line=line,
                evidence={"dtype": name_of(dtype)},
                fix=f"with preamp.autocast({kind!r}, dtype={dtype}): ...  # in place of torch.autocast",
            )
        )


def in_low_precision(call: Call, said: str, broke: bool, evidence: dict[str, Any]) -> Finding:
    """PA104 of an operator whose result 16 bits spoil: an error where it is beyond their range (`broke`)."""
    severity: Severity = "error" if broke else "warning"
    file, line = call.place()
    return Finding(
        "PA104", severity, said,
        module=call.module, op=call.base, direction="forward", file=file, line=line, evidence=evidence,
        fix="x = x.float()  # before this line\n"
        "# or train under O1 or O2, whose regions run it in float32: preamp.prepare(model, optimizer, level='O2')",
    )  # fmt: skip


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


_CARRIES = frozenset({
    "_to_copy", "clamp", "clamp_min", "clamp_max", "rsub", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze",
    "select", "slice", "detach", "alias", "clone", "t", "transpose", "expand", "flatten", "permute",
})  # fmt: skip
"""Operators after which a sigmoid is still a sigmoid that has been rounded; add and sub with a constant join them."""

_WITH_LOGITS = "loss = F.binary_cross_entropy_with_logits(logits, target)  # BCEWithLogitsLoss; drop the sigmoid"


class SigmoidWatcher(Watcher):
    """PA102 as it happens: a 16-bit sigmoid whose logarithm is taken, or a 16-bit binary cross entropy."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._rounded: Any = WeakTensorKeyDictionary()

    def function(
        self, function: Any, args: tuple[Any, ...], module: str, place: Callable[[], tuple[str | None, int | None]]
    ) -> bool:
        """A region refuses a 16-bit binary cross entropy: report it, and have it run in float32."""
        if function is not F.binary_cross_entropy or not args or args[0].dtype not in LOW_DTYPES:
            return False
        self.findings.append(_sigmoid_finding("binary_cross_entropy", args[0].dtype, module, *place(), "error"))
        return True

    def after(self, call: Call) -> None:
        """Follow rounded sigmoids, and report the logarithm of one."""
        base = call.base
        if base == "sigmoid" and _float(call.out) and call.out.dtype in LOW_DTYPES:
            self._rounded[call.out] = call.out.dtype, False
            return
        first = next(iter(call.inputs), None)
        known = None if first is None else self._rounded.get(first)
        if known is None:
            return
        dtype, turned = known
        if base in ("log", "log2", "log10", "binary_cross_entropy"):
            both = turned or base == "binary_cross_entropy"
            where = call.module, *call.place()
            self.findings.append(_sigmoid_finding(f"sigmoid, {base}", dtype, *where, "error", of_rest=both))
        elif (base in _CARRIES or (base in ("add", "sub") and len(call.inputs) == 1)) and _float(call.out):
            self._rounded[call.out] = dtype, turned or base == "rsub"


def _sigmoid_finding(
    op: str, dtype: torch.dtype, module: str | None, file: str | None, line: int | None, severity: Severity, *,
    of_rest: bool = True,
) -> Finding:  # fmt: skip
    """`of_rest`: the logarithm is one of 1 minus the sigmoid, or of both."""
    kind, info = name_of(dtype), torch.finfo(dtype)
    # 1 - sigmoid(x) is below half the distance to the next number under 1 from this logit on; sigmoid(x) itself is
    # about exp(x), and below half of the smallest number from the other.
    top, bottom = math.log(4 / info.eps), math.log(info.smallest_normal * info.eps / 2)
    if of_rest:
        told = f"a sigmoid in {kind} is exactly 1 for logits above {top:.1f}; the logarithm of 1 minus it is -inf"
    else:
        told = (
            f"a sigmoid in {kind} is exactly 1 for logits above {top:.1f}, where the loss and its gradient become 0, "
            f"and 0 for logits below {bottom:.1f}, where its logarithm is -inf"
        )
    return Finding(
        "PA102", severity, told, module=module, op=op, direction="forward", file=file, line=line,
        evidence={"dtype": kind, "saturates at logit": round(top, 1)}, fix=_WITH_LOGITS,
    )  # fmt: skip


def static_cross_entropy(
    model: nn.Module, loss: Any, policy: Policy, out_dtype: torch.dtype | None
) -> Iterator[Finding]:
    """BCELoss in the model or as the loss, under a 16-bit compute dtype.

    An error where the model was seen to give 16-bit numbers, which a region refuses; else a warning: what is float32
    by then may have been rounded before.
    """
    if policy.compute not in LOW_DTYPES:
        return
    found: list[str] = []
    if loss is F.binary_cross_entropy:
        found = ["loss"]
    elif isinstance(loss, nn.Module):
        found = [f"loss.{path}" if path else "loss" for path, m in loss.named_modules() if isinstance(m, nn.BCELoss)]
    parts: list[tuple[str | None, str]] = [(None, name) for name in found]
    parts += [(path, path) for path, part in model.named_modules() if isinstance(part, nn.BCELoss)]
    severity: Severity = "error" if policy.has_regions and out_dtype in LOW_DTYPES else "warning"
    for path, name in parts:
        finding = _sigmoid_finding("binary_cross_entropy", policy.compute, path, None, None, severity)
        yield Finding(
            "PA102", severity, f"{name or 'the model'} is a binary cross entropy of probabilities; {finding.message}",
            module=path, op=finding.op, evidence=finding.evidence, fix=_WITH_LOGITS,
        )  # fmt: skip
