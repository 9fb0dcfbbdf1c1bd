"""Compares what operators gave with what they gave on shadows, and keeps facts."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...formats import FP16, name_of
from ..measure import key_of
from ..operators import Call, Observer
from ..places import Place, in_library
from ..records import Line
from .facts import Fact, Kind
from .source import Readings
from .values import WIDE, Shadows, has_shadow, relative_error, share_differing, share_lost

OFF = 0.25
"""Relative error of a result, ||value - shadow|| / ||shadow||, from which it is one: far more than rounding."""
AGREES = 0.06
"""Relative error up to which an input counts as right: twice bfloat16's rounding, many times over."""
DECIDES = 0.02
"""Relative error up to which float32 gets a result right. What float32 gets wrong, no precision is to blame for."""
OTHERWISE = 0.1
"""Share of the entries of an index or mask that differ from the shadow's, from which they are decided otherwise."""
TURNS, MANY_TURNS = frozenset({"sin", "cos"}), 64.0
"""Operators of which a few entries may be all wrong, and the angle from which these are off if `OTHERWISE` is."""
ZEROS = 0.5
"""Share of the entries that are zero and should not be, from which a result is lost to zero."""
DECIDING = frozenset({
    "_to_copy", "bucketize", "searchsorted", "linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu_factor_ex",
    "linalg_solve_ex", "linalg_ldl_factor_ex", "eq", "ne", "gt", "lt", "ge", "le",
})  # fmt: skip
"""Operators whose integers and truth values mean something. The place of a maximum is none: ties decide it."""
_MOVES = frozenset({
    "clone", "stack", "cat", "_unsafe_view", "embedding", "index_select", "gather", "index", "repeat", "flip", "roll",
    "select_backward", "slice_backward", "tril", "triu", "diagonal_backward", "diag_embed", "masked_select", "take",
    "constant_pad_nd", "sort", "topk", "pixel_shuffle", "slice_scatter", "select_scatter",
})  # fmt: skip
"""Operators that put numbers elsewhere and change none."""
_CASTS = frozenset({"_to_copy", "copy"})
_RIGHT = (0.0, "", "")
_ADDS = frozenset({"add", "clamp_min", "clamp", "maximum"})
"""Operators that keep a denominator from zero."""
_MEANT = frozenset({"exp", "expm1"})
"""Operators whose infinity a division rightly makes a zero: a sigmoid that is written by hand."""
_ADD_UP = frozenset({
    "sum", "mean", "mm", "addmm", "bmm", "baddbmm", "sub", "add", "rsub", "_softmax_backward_data", "convolution",
    "convolution_backward", "native_layer_norm_backward", "native_batch_norm_backward", "_log_softmax_backward_data",
})  # fmt: skip
"""Operators that add up terms of both signs: what is left may be of no weight beside them."""
_LOGS = frozenset({"log", "log2", "log10", "log1p"})
"""Operators for which the smallest entries count, of inputs that are right as a whole."""
_ENLARGE = {"sqrt": 0, "rsqrt": 0, "reciprocal": 0, "log": 0, "log2": 0, "log10": 0, "div": 1}
"""Operators that make much of what is nearly nothing, and which argument that is."""


class Judge(Observer):
    """Finds where a value goes wrong that float32 would have got right. What runs operators on shadows inherits it.

    `limit`: bytes that shadows may take, as `Shadows` has it; `readings`: where what statements read is kept.
    """

    def __init__(self, limit: float | None, readings: Readings) -> None:
        self.readings, self.shadows = readings, Shadows(limit, readings.casts)
        self.causes: dict[int, Fact] = {}
        """By storage, what made it as wrong as it is."""
        self.read_out: dict[Fact, None] = {}
        """What made numbers that the script read, and that are not finite."""
        self.broke: list[tuple[Place, Fact]] = []
        """Where something not finite came of finite numbers, and the fact behind it."""
        self.grown: dict[Line, Fact] = {}
        """What is not finite, of inputs whose errors have grown little by little."""
        self.errors: dict[Place, tuple[float, str, str]] = {}
        """The largest relative error of what was computed in a place, by which operator, and in which dtype."""
        self.gradients_off = 0.0
        """Relative error of all gradients together, where no operator is to blame."""
        self._small: set[Fact] = set()
        """What left nearly nothing of large terms: wrong, and harmless until something divides by it."""
        self._trail: dict[int, tuple[Line, tuple[int, ...]]] = {}
        """By storage, the line that wrote it last and the storages that it read."""
        self._facts: dict[Any, Fact] = {}
        self._hidden: dict[int, Fact] = {}
        """By storage, what is not finite and has become numbers that are wrong and small beside others so far."""

    def nudged(self, call: Call) -> list[Tensor]:
        """What an operator gives, computed in float64, for inputs that are a rounding of float32 beside the right ones;
        with what it changes in place first.
        """
        raise NotImplementedError

    def judge(self, call: Call, out: Tensor, exact: Tensor, before: float) -> None:
        """Whether a result is off although its inputs are right, and float32 would have got it right."""
        key, written = key_of(out), {id(t) for t in call.written}
        moves = call.base in _MOVES or (call.base in _CASTS and out.dtype is not torch.float16)
        causes = (self.causes.get(key_of(t)) for t in call.given if not moves or id(t) not in written)
        cause = next((one for one in causes if one is not None), None)
        hidden = next((self._hidden[key_of(t)] for t in call.given if key_of(t) in self._hidden), None)
        self._hidden.pop(key, None)
        self.causes.pop(key, None)
        if moves:  # as wrong as what it reads
            self._hidden |= {} if hidden is None else {key: hidden}
            self.causes |= {} if cause is None else {key: cause}
            return
        error = self._off_by(call, out, exact)
        if error > self.errors.get(call.place, _RIGHT)[0]:
            self.errors[call.place] = error, call.base, name_of(out.dtype)
        constant = _misfit(call, out, exact)
        read = [t for t in call.inputs if has_shadow(t) and id(t) not in written]
        came = cause is not None and cause.kind == "not finite" and bool(out.isfinite().all())
        hides = came and not all(bool(t.isfinite().all()) for t in read)
        if hides and cause is not None and cause.op not in _MEANT:
            hidden = replace(cause, hidden_by=call.base)
        alone = hides or cause is None or cause.hidden_by is not None  # nothing else makes it wrong
        if hidden is not None and alone and bool(out.isfinite().all()):
            each = not hides and torch.Tag.pointwise in call.func.tags
            seen = torch.where(self._right(out, read), exact, out.detach()) if each else out
            least = DECIDES if hidden.op in _CASTS else OFF  # what does not fit is meant by nobody
            if max(relative_error(seen, exact), _most_off(seen, exact) if hides else 0.0) >= least:
                self._report(hidden)
                if not hides:
                    self.causes[key] = hidden
                    return
            elif bool(((seen - exact).abs() > AGREES * exact.abs()).any()) and (hides or each):
                self._hidden[key] = hidden
        off_from = OTHERWISE if call.base in TURNS and _largest(read) >= MANY_TURNS else OFF
        if constant is not None:
            kind: Kind = "lost" if abs(constant) < 1 else "not finite"
            self._report(replace(self._fact(kind, call, out, error, 0.0, read), constant=constant))
        if error < off_from:
            return
        if cause is not None:
            self.causes[key] = cause
            self._enlarged(call)
        off, finite = max(map(self.error_of, read), default=0.0), bool(out.isfinite().all())
        if not all(bool(t.isfinite().all()) for t in read):
            return
        blamed = max(off, before) <= AGREES and (not finite or self._is_off(call, out, exact, read, off_from))
        if not blamed or not self._float32_decides(call, exact):
            if not finite and cause is not None:
                self.broke.append((call.place, cause))
            elif not finite:
                self.grown.setdefault(call.place.at, self._fact("not finite", call, out, error, off, read))
            return
        if finite and self._is_nearly_nothing(call, out, exact):
            if call.place.direction == "forward":
                self.causes[key] = fact = self._fact("made", call, out, error, off, read)
                self._small.add(fact)
            return
        kind = "made" if finite else "not finite"
        if finite and (lost := share_lost(out, exact)) > ZEROS:
            kind, error = "lost", lost
        elif finite and out.dtype is torch.float16 and _is_subnormal(exact):
            kind = "lost"
        self.causes[key] = fact = self._fact(kind, call, out, error, off, read)
        if finite:
            self._report(fact)
        else:
            self.broke.append((call.place, fact))

    def _off_by(self, call: Call, out: Tensor, exact: Tensor) -> float:
        """The relative error of a result; of a running sum, the error in terms of what is added."""
        error = relative_error(out, exact)
        if call.base == "cumsum" and math.isfinite(error) and call.inputs:
            terms = self.shadows.of(call.inputs[0])
            error *= float(torch.linalg.vector_norm(exact)) / (float(torch.linalg.vector_norm(terms)) or 1.0)
        return error

    def _enlarged(self, call: Call) -> None:
        """What is nearly nothing, and wrong, is divided by: the operator that left it is at fault."""
        position = _ENLARGE.get(call.base)
        small = call.args[position] if position is not None and position < len(call.args) else None
        cause = self.causes.get(key_of(small)) if isinstance(small, Tensor) else None
        if cause is not None and cause in self._small and call.place.direction == "forward":
            self._report(cause)

    def gradients_came(self, gradients: Iterable[Tensor | None]) -> None:
        """Gradients of parameters: if they are off as a whole, what left nearly nothing and leads there is at fault."""
        off, size, share = 0.0, 0.0, defaultdict[Fact, float](float)
        for gradient in gradients:
            shadow = None if gradient is None or not has_shadow(gradient) else self.shadows.find(gradient)
            if gradient is None or shadow is None or not bool(shadow.isfinite().all()):
                continue
            exact = shadow.double()  # squares of gradients may be less than float32 holds
            wrong = float((gradient.detach() - exact).square().sum())
            off, size = off + wrong, size + float(exact.square().sum())
            cause = self.causes.get(key_of(gradient))
            if cause is not None:
                share[cause] += wrong
        self.gradients_off = math.sqrt(off / size) if size else 0.0
        for cause, wrong in share.items() if off >= OFF**2 * size else ():
            if cause in self._small and wrong >= off / 2:
                self._report(cause)

    def _fact(self, kind: Kind, call: Call, out: Tensor, error: float, off: float, read: list[Tensor]) -> Fact:
        largest = _largest(read)
        dtype = out.dtype if out.is_floating_point() else read[0].dtype
        lines = self._lines_before(call)
        shape = tuple(out.shape)
        return Fact(kind, call.base, call.place, name_of(dtype), shape, error, off, largest, lines=lines)

    def _lines_before(self, call: Call) -> tuple[Line, ...]:
        """The line of a call, and the lines that led to what it reads, the nearest first."""
        found, left, seen = [call.place.at], deque(key_of(t) for t in call.inputs), set[int]()
        while left and len(found) < 8:
            key = left.popleft()
            line, read = self._trail.get(key, (self.shadows.cast_at.get(key, call.place.at), ()))
            if key not in seen:
                seen.add(key)
                left.extend(read)
                if line not in found and (line[0] == call.place.at[0] or (line[0] and not in_library(line[0]))):
                    found.append(line)
        return tuple(found)

    def note_read(self, call: Call) -> None:
        """The script reads a number: one that is not finite, though float32's is, has come to light."""
        for tensor in call.inputs:
            cause = self.causes.get(key_of(tensor))
            if cause is not None and cause.kind == "not finite" and not bool(tensor.isfinite()):
                self.read_out.setdefault(cause)

    def _report(self, fact: Fact) -> None:
        """Keep a fact, once for each place."""
        key = (fact.kind, fact.op, fact.place.file, fact.place.line, fact.place.module, fact.place.direction)
        self._facts.setdefault(key, fact)

    @property
    def facts(self) -> list[Fact]:
        """What was found so far."""
        return [*self._facts.values()]

    def _float32_decides(self, call: Call, exact: Tensor) -> bool:
        tried = self.nudged(call)
        return any(t.shape == exact.shape and relative_error(exact, t) < DECIDES for t in tried)

    def judge_decision(self, call: Call, out: Tensor, exact: Tensor) -> None:
        """Whether integers or truth values are others than those of the shadows."""
        share = share_differing(out, exact)
        read = [t for t in call.inputs if has_shadow(t)]
        if read and share > self.errors.get(call.place, _RIGHT)[0]:
            self.errors[call.place] = share, call.base, name_of(read[0].dtype)
        if share < OTHERWISE or not read or not all(bool(t.isfinite().all()) for t in read):
            return
        off = max(map(self.error_of, read))
        tried = [t for t in self.nudged(call) if t.dtype is out.dtype and t.shape == out.shape]
        if off < OFF and tried and share_differing(tried[0], exact) < DECIDES:
            self._report(self._fact("decided", call, out, share, off, read))

    def _is_off(self, call: Call, out: Tensor, exact: Tensor, read: list[Tensor], off_from: float) -> bool:
        """Whether entries are off whose own inputs are right: of operators that compute each entry by itself."""
        if torch.Tag.pointwise not in call.func.tags or (call.base in _LOGS and call.place.direction == "forward"):
            return True
        right = self._right(out, read)
        return relative_error(out.detach()[right], exact[right]) >= off_from

    def _right(self, out: Tensor, read: list[Tensor]) -> Tensor:
        """Which entries of a result have inputs that are right, where those can be laid beside it."""
        right = torch.ones_like(out, dtype=torch.bool)
        for tensor in read:
            shadow = self.shadows.find(tensor)
            if shadow is not None:
                right &= (tensor.detach().to(WIDE) - shadow).abs() <= AGREES * shadow.abs()
        return right

    def _is_nearly_nothing(self, call: Call, out: Tensor, exact: Tensor) -> bool:
        """Whether the error is no more than rounding beside the terms from which the result was added up."""
        if call.base not in _ADD_UP:
            return False
        terms = [t for t in call.inputs if t.numel()]
        rounding = max((self._rounding_of(t) for t in terms), default=0.0)
        many = math.sqrt(max((t.numel() for t in terms), default=1) / max(out.numel(), 1))
        return float((out.detach().to(WIDE) - exact).abs().max()) < 8 * rounding * max(many, 1.0)

    def _rounding_of(self, tensor: Tensor) -> float:
        """The largest absolute error that it brings along, its own rounding at least."""
        own = torch.finfo(tensor.dtype).eps * float(tensor.detach().abs().max())
        shadow = self.shadows.find(tensor)
        return own if shadow is None else max(own, float((tensor.detach().to(WIDE) - shadow).abs().max()))

    def error_of(self, tensor: Tensor) -> float:
        """The relative error of a tensor, 0 where it has no shadow."""
        shadow = self.shadows.find(tensor)
        return 0.0 if shadow is None else relative_error(tensor, shadow)


def _largest(tensors: list[Tensor]) -> float:
    return max((float(t.detach().abs().max()) for t in tensors if t.numel()), default=0.0)


def _most_off(out: Tensor, exact: Tensor) -> float:
    """The largest error of an entry beside the largest entry: one of many may be all wrong."""
    largest = float(exact.abs().max()) if exact.numel() else 0.0
    return float((out.detach().to(WIDE) - exact).abs().max()) / largest if 0 < largest < math.inf else 0.0


def _is_subnormal(exact: Tensor) -> bool:
    """Whether most of what is not zero lies below float16's normal numbers."""
    there = exact != 0
    return float((exact.abs() < FP16.smallest_normal)[there].double().mean()) > ZEROS


def _misfit(call: Call, out: Tensor, exact: Tensor) -> float | None:
    """A constant that float16 makes zero or infinite, and a result with it."""
    if out.dtype is not torch.float16 or call.place.direction != "forward":
        return None
    for number in call.numbers:
        if FP16.max < abs(number) < math.inf and bool((out.isinf() & exact.isfinite()).any()):
            return number
        if 0 < number < FP16.smallest_normal and call.base in _ADDS and bool(((out == 0) & (exact != 0)).any()):
            return number
    return None
