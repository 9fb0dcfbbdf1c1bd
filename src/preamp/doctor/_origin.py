"""Provenance: the first operator that makes a non-finite value out of finite ones, forward or backward.

A replay runs under a dispatch mode that sees every operator. Each non-finite tensor gets a trail back to where it
began; a trail counts only when it reaches the loss or a gradient, since an infinity that a `where`, a `clamp` or a
softmax removes again harms nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..report import Finding
from ..tree import tensors
from ._places import (
    UNINITIALISED,
    Models,
    Operand,
    Place,
    Places,
    eager,
    go_back,
    is_finite,
    key_of,
    named_parts,
    numbers_in,
    operand_of,
    put_back_leaves,
    signs_of,
    storage_bytes,
    untouched,
    written_by,
)

_CARRIERS = 20
_NO_NAMES: MappingProxyType[str, Any] = MappingProxyType({})

_CONSTANTS = frozenset({
    "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor",
    "index_fill", "index_fill_", "constant_pad_nd", "lift", "lift_fresh", "lift_fresh_copy",
})  # fmt: skip
"""Operators that write a constant: what they write is meant to be there."""
_MOVERS = frozenset({
    "_to_copy", "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "t", "transpose", "permute",
    "expand", "slice", "select", "squeeze", "unsqueeze", "split", "unbind", "copy_", "cat", "stack",
    "index_select", "narrow", "unfold", "as_strided",
})  # fmt: skip
"""Operators that only hand data on: whoever computes with it is its first consumer."""
_SAME = ("detach", "alias")
"""Autograd's own handling of saved tensors: not worth a carrier's line."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first non-finite value came from.

    `module`: path of `named_modules` (root "", `name:path` with several models), None outside of all models; `op`:
    aten overload; `file`, `line`: the user's line that ran it, for a backward operator the forward line that made
    its node; `inputs`, `output`: what it read and the first non-finite tensor it wrote; `constants`: numbers among
    its arguments; `kind`: of the output, NaN before inf; `carriers`: (module, op, direction) of those that passed it
    on, in order, each once, at most 20; `from_data`: the value was there before any operator, in `source` (a
    parameter's or buffer's path, None for an input), and module and op are its first consumer; `own`: (file, line)
    inside a backward written in Python.
    """

    module: str | None
    op: str
    direction: Literal["forward", "backward"]
    file: str | None
    line: int | None
    inputs: tuple[Operand, ...]
    output: Operand
    kind: Literal["inf", "nan"]
    carriers: tuple[tuple[str | None, str, str], ...] = ()
    from_data: bool = False
    source: str | None = None
    constants: tuple[float, ...] = ()
    own: tuple[str, int] | None = None

    def finding(self, step: int | None = None) -> Finding:
        """PA201, or PA207 when the value came with the data; `step` counts optimizer-step attempts from 0."""
        where = "outside the models" if self.module is None else f"in module {self.module or '(root)'!r}"
        if self.from_data:
            what = f"parameter or buffer {self.source!r}" if self.source else "an input"
            came = "nan" if any(i.nan for i in self.inputs) else "inf" if any(i.inf for i in self.inputs) else self.kind
            message = f"{what} was {came} before any operator ran; {self.op} {where} is the first to compute with it"
        else:
            message = f"{self.op} ({self.direction}) {where} made {self.kind} out of finite values"
        evidence: dict[str, Any] = {f"input {i}": str(operand) for i, operand in enumerate(self.inputs)}
        evidence["output"] = str(self.output)
        if self.constants:
            evidence["constants"] = list(self.constants)
        if self.own:
            evidence["backward written at"] = f"{self.own[0]}:{self.own[1]}"
        if self.carriers:
            evidence["carried by"] = [f"{m or '(root)'} {op} ({way})" for m, op, way in self.carriers]
        return Finding(
            code="PA207" if self.from_data else "PA201",
            severity="error",
            message=message,
            module=self.module,
            op=self.op,
            direction=self.direction,
            file=self.file,
            line=self.line,
            step=step,
            evidence=evidence,
            fix=_cure(self),
        )


@dataclass(slots=True)
class _Trail:
    """One non-finite beginning. `meant`: an infinity written on purpose, of this sign, and no origin (0: not so)."""

    origin: Origin
    number: int
    meant: float = 0.0
    only_moved: bool = False
    carriers: dict[tuple[str | None, str, str], None] = field(default_factory=dict)


class _Observer(TorchDispatchMode):
    """Keeps a trail for every storage that holds a non-finite value."""

    def __init__(self, places: Places, sources: dict[int, str]) -> None:
        super().__init__()
        self._places = places
        self._sources = sources
        self._trails: dict[int, _Trail] = {}
        self._count = 0
        self.reached: list[_Trail] = []
        self.leaves: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or _NO_NAMES
        read = [*tensors(args), *tensors(dict(kwargs))]
        written = written_by(func, args, kwargs)
        place = self._places.place(any(tensor._is_view() for tensor in written))
        with torch.no_grad():
            self._note_leaf(read)
            old = {id(tensor): (operand_of(tensor), self._trails.get(key_of(tensor))) for tensor in written}
        out = func(*args, **kwargs)
        with torch.no_grad():
            self._judge(func, read, old, (args, dict(kwargs)), [*tensors(out), *written], place)
        return out

    def _note_leaf(self, read: list[Tensor]) -> None:
        """What autograd adds to a leaf's gradient has arrived; a leaf's gradient is kept, to be put back."""
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "torch::autograd::AccumulateGrad":
            return
        leaf: Tensor = node.variable  # type: ignore[attr-defined]
        if id(leaf) not in self.leaves:
            self.leaves[id(leaf)] = (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone())
        for tensor in read:
            self.arrive(tensor)

    def arrive(self, tensor: Tensor) -> None:
        """`tensor` is a result: if it is not finite, its trail counts."""
        trail = self._trails.get(key_of(tensor))
        if trail is not None and not is_finite(tensor):
            self.reached.append(trail)

    def _judge(
        self, func: Any, read: list[Tensor], old: Any, arguments: Any, wrote: list[Tensor], place: Place
    ) -> None:
        name = func._schema.name.rpartition("::")[2]
        sick = [] if name in UNINITIALISED else [tensor for tensor in wrote if not is_finite(tensor)]
        keys, aliased = {key_of(tensor) for tensor in sick}, {key_of(tensor) for tensor in read}
        for tensor in wrote:
            # A part that is finite says nothing of the rest of its storage.
            whole = tensor.numel() * tensor.element_size() >= storage_bytes(tensor)
            if key_of(tensor) not in keys and (whole or key_of(tensor) not in aliased):
                self._trails.pop(key_of(tensor), None)
        if not sick:
            return
        # What it overwrote is described as it was before.
        pairs = [old.get(id(t)) or (operand_of(t), self._trails.get(key_of(t))) for t in read]
        output = operand_of(sick[0])
        first = Origin(
            place.module, str(func), place.direction, place.file, place.line,
            inputs=tuple(operand for operand, _ in pairs), output=output, kind="nan" if output.nan else "inf",
            constants=tuple(numbers_in(arguments)), own=place.own,
        )  # fmt: skip
        trail = self._trail(name, first, pairs, read, sick)
        for tensor in sick:
            self._trails[key_of(tensor)] = trail

    def _trail(
        self,
        name: str,
        here: Origin,
        pairs: list[tuple[Operand, _Trail | None]],
        read: list[Tensor],
        sick: list[Tensor],
    ) -> _Trail:
        """The trail that the non-finite tensors `sick` lie on: one that came in, or a new one."""
        bad = [(trail, t) for (seen, trail), t in zip(pairs, read, strict=True) if seen.inf or seen.nan]
        signs: set[float | None] = {sign for tensor in sick for sign in signs_of(tensor)}
        incoming = sorted((trail for trail, _ in bad if trail and not trail.meant), key=lambda trail: trail.number)
        if incoming:
            trail = incoming[0]
            if trail.only_moved and name not in _MOVERS:
                trail.only_moved = False
                trail.origin = replace(here, from_data=True, source=trail.origin.source)
                trail.carriers.clear()
            elif name not in _SAME and len(trail.carriers) < _CARRIERS:
                trail.carriers.setdefault((here.module, here.op, here.direction))
            return trail
        meant = [trail.meant for trail, _ in bad if trail]
        if meant and signs <= set(meant):
            return next(trail for trail, _ in bad if trail)  # a mask that is still one
        if not meant and name in _CONSTANTS and (not bad or name.startswith("lift")):
            wanted: set[float | None] = {number for number in here.constants if math.isinf(number)}
            if name.startswith("lift"):
                wanted = signs & {math.inf, -math.inf}
            if len(signs) == 1 and signs <= wanted:
                return self._new(here, meant=signs.pop())
        strangers = [t for trail, t in bad if trail is None]
        if strangers:
            seen = {sign for tensor in strangers for sign in signs_of(tensor)}
            if seen == {-math.inf} and signs == seen:
                return self._new(here, meant=-math.inf)  # a mask that came in from outside
            softmax = seen == {-math.inf} and "softmax" in name
            if not softmax:
                source = next((self._sources[key_of(t)] for t in strangers if key_of(t) in self._sources), None)
                return self._new(replace(here, from_data=True, source=source), only_moved=name in _MOVERS)
        return self._new(here)

    def _new(self, origin: Origin, **facts: Any) -> _Trail:
        self._count += 1
        return _Trail(origin, self._count, **facts)


def find_origin(
    run: Callable[[], Any],
    *,
    models: Models,
    backward: Callable[[Tensor], None] | None = None,
    preserve: bool = True,
) -> Origin | None:
    """The first operator of a step that makes a non-finite value out of finite ones, or None for a healthy step.

    `run` does the forward pass and returns the loss: a tensor, or several in a list or a mapping, or None when it
    has done its own backward. Backward follows for each loss (together, when several), or `backward(loss)`, for
    instance to scale it; it is left out when the loss is already sick. `preserve`: gradients, buffers, training flags,
    random states and autocast's caches are afterwards as before, bit for bit; plain attributes of modules, and what
    the user's own hooks step, are not put back. Compiled models run eagerly. What `run` or `backward` raises is raised,
    after everything is put back.
    """
    return trace(lambda places: run(), models, backward, preserve)


def trace(
    run: Callable[[Places], Any], models: Models, backward: Callable[[Tensor], None] | None, preserve: bool = True
) -> Origin | None:
    """`find_origin`, for a `run` that knows better than the stack where its operators come from."""
    paths, owners, held = named_parts(models)
    places = Places(paths.get, owners, trace.__code__)
    observer = _Observer(places, {key_of(tensor): name for name, tensor in held})
    with ExitStack() as stack:
        stack.callback(places.close)
        if preserve:
            stack.enter_context(untouched(list(paths)))
            stack.callback(put_back_leaves, observer.leaves)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode lives on this thread
        stack.enter_context(eager())
        with observer:
            losses = list(tensors(run(places)))
        for loss in losses:
            observer.arrive(loss)
        if not observer.reached:
            with observer:
                go_back([loss for loss in losses if loss.requires_grad], backward)
            for parameter in (p for module in paths for p in module._parameters.values()):
                if parameter is not None and parameter.grad is not None:
                    observer.arrive(parameter.grad)
    if not observer.reached:
        return None
    trail = min(observer.reached, key=lambda trail: (bool(trail.meant), trail.number))
    return replace(trail.origin, carriers=tuple(trail.carriers))


_LOW = ("fp16", "float16", "bf16", "bfloat16")
_HALF = ("fp16", "float16")
_CONTRACTIONS = ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot", "matmul", "convolution", "linear")
_GROWING = {
    "exp": "exp", "expm1": "expm1", "pow": "pow", "sum": "sum", "cumsum": "cumsum", "prod": "prod", "var": "var",
    "mean": "mean", "norm": "norm", "linalg_vector_norm": "norm", "_softmax": "softmax",
    "_log_softmax": "log_softmax", "native_layer_norm": "layer_norm", "square": "pow", "sinh": "sinh", "cosh": "cosh",
}  # fmt: skip
"""Operators whose results outgrow fp16, and the name a policy knows them by."""
_MASKING = ("mul", "where", "add", "sub", "masked_fill", "full", "full_like", "fill", "scalar_tensor", "_to_copy")


def _cure(origin: Origin) -> str:
    """Text to paste, or to follow where the code is the user's to change."""
    if origin.from_data:
        return _data(origin)
    name = origin.op.removeprefix("aten.").partition(".")[0].rstrip("_")
    reads = [operand for operand in origin.inputs if operand.dtype in _LOW]
    dtype = origin.output.dtype
    torch_dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}.get(dtype, dtype)
    has_zero = any(o.min is not None and o.max is not None and o.min <= 0 <= o.max for o in origin.inputs)
    if name in ("_softmax", "_log_softmax") and any(operand.inf for operand in origin.inputs):
        return (
            "a row is masked from end to end: leave one entry per row unmasked, or fill with torch.finfo(x.dtype).min"
        )
    if name in ("div", "reciprocal", "rsqrt", "log", "log2", "log10", "sqrt") and has_zero:
        epsilon = "1e-4" if dtype in _HALF else "1e-8"
        if origin.direction == "backward":
            return (
                f"the forward line's derivative is infinite at 0: keep its argument away from it, for instance "
                f"x.clamp(min={epsilon}) ({epsilon} is a normal number of torch.{torch_dtype})"
            )
        return f"x.clamp(min={epsilon}) before it: {epsilon} is a normal number of torch.{torch_dtype}"
    large = any(abs(c) > 65504 for c in origin.constants) or any(
        not o.shape and o.min is not None and abs(o.min) > 65504 for o in origin.inputs
    )
    if name in _MASKING and large and dtype in _HALF:
        return "a constant is beyond the range of float16: fill with torch.finfo(x.dtype).min instead"
    if name in _GROWING and (reads or dtype in _LOW):
        return f'preamp.prepare(..., policy="O1; {_rule(origin, _GROWING[name])} -> full")'
    if origin.direction == "backward" and dtype in _HALF:
        return "a gradient outgrew float16: lower the loss scale, or use bfloat16: preamp.prepare(..., policy='O4')"
    if dtype in _HALF:
        return (
            f'preamp.prepare(..., policy="O4"), which has the range of float32, or '
            f'preamp.prepare(..., policy="O1; {_rule(origin, None)} -> full")'
        )
    return f"{name} leaves the range of {torch_dtype}, which is no matter of low precision: bound what it reads"


def _rule(origin: Origin, op: str | None) -> str:
    path = (origin.module or "").rpartition(":")[2]
    return path or (f"op {op}" if op else ".*")


def _data(origin: Origin) -> str:
    if origin.source:
        return f"{origin.source!r} is already damaged: go back to a checkpoint in which it is finite"
    return "assert torch.isfinite(batch).all() where the batch is made, and leave out or repair the entries that fail"
