"""The suites `step` and `lists`: the optimizer alone, on lists of tensors.

`step`: `scaler.step(optimizer); scaler.update()`. `lists`: the same for Adam, with all that precision costs around it:
a loss is scaled and backward is run, weights and gradients are cast, gradients checked, unscaled and clipped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, ParameterList

from preamp import optim
from preamp.errors import PreampWarning
from preamp.scaling import DynamicScale, GradScaler
from preamp.session import prepare

from .counting import count, launches
from .harness import Row, Setting
from .race import Entry, Step, race
from .trainers import AMP_BF16, CAPTURED, FOREACH, O2, O5_EIGHT, O5_SPLIT, REFERENCE, REFERENCE_CAPTURED, Graphed

Shapes = list[tuple[int, ...]]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


def bert_shapes(layers: int, width: int) -> Shapes:
    """The parameter tensors of a BERT encoder with its masked-language head (Devlin et al. 2019)."""
    vocabulary, positions = 30522, 512
    shapes: Shapes = [(vocabulary, width), (positions, width), (2, width), (width,), (width,)]
    for _ in range(layers):
        shapes += [(width, width), (width,)] * 4 + [(width,)] * 4
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width, width), (width,), (width,), (width,), (vocabulary,)]


LISTS: dict[str, tuple[Shapes, int]] = {
    "150 x 1k": ([(25, 40)] * 150, 20),
    "1500 x 1k": ([(25, 40)] * 1500, 4),
    "150 x 100k": ([(250, 400)] * 150, 3),
    "1500 x 100k": ([(250, 400)] * 1500, 1),
    "BERT-base": (bert_shapes(12, 768), 1),
    "BERT-large": (bert_shapes(24, 1024), 1),
}
"""Shapes, and how many steps are timed at once."""

TINY: dict[str, tuple[Shapes, int]] = {"8 x 60": ([(6, 10)] * 8, 20)}

START = 1.0
"""Where the dynamic scales of all contenders start: gradients are unscaled in place by some, and must not shrink."""


def leaves(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Parameters with gradients, of a seed."""
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        leaf = Parameter(torch.randn(shape, device=device, dtype=dtype) * 0.02)
        leaf.grad = torch.randn_like(leaf) * 1e-3
        made.append(leaf)
    return made


def scaled(kind: type[torch.amp.GradScaler], optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    """A step of the optimizer under a scaler."""
    scaler = kind(device.type, init_scale=START)
    scaler.scale(torch.zeros((), device=device))

    def go() -> None:
        scaler.step(optimizer)
        scaler.update()

    return go


# -- the suite `step`


def step_rows(setting: Setting) -> Iterator[Row]:
    """By kind of optimizer and list; for 16-bit parameters with masters too."""
    cuda = setting.device.type == "cuda"
    for kind, arguments in {"Adam": {"lr": 1e-9}, "SGD": {"lr": 1e-9, "momentum": 0.9}}.items():
        for name, (shapes, number) in (TINY if setting.tiny else LISTS).items():
            entries = sum(map(math.prod, shapes))
            works = {f"{kind}, {name}": in_float32}
            if (kind == "Adam" and entries <= 20_000_000) or cuda:
                works[f"{kind}, {name}, 16-bit parameters"] = with_masters
            if entries > 200_000_000 and not cuda:  # contenders' states would not fit a small machine
                continue
            for title, make in works.items():
                measure = partial(_race_steps, partial(make, kind, arguments, shapes), number)
                yield Row(suite="step", name=title, what="scaler.step and update", measure=measure, seconds=10)


def _race_steps(make: Callable[[torch.device], dict[str, Step]], number: int, setting: Setting) -> dict[str, Any]:
    def begin(entry: Entry) -> None:
        entry.begin()  # states are made, lists are cached
        entry.found["counts"] = {**count(entry.step), "launches": launches(entry.step)}

    steps = make(setting.device)
    entries = [Entry(who, lambda _, who=who: steps[who], number=number) for who in steps]  # type: ignore[misc]
    return {"contenders": race(entries, setting, begin)}


def in_float32(kind: str, arguments: dict[str, Any], shapes: Shapes, device: torch.device) -> dict[str, Step]:
    """Contenders of torch share parameters: each has states of its own only. preamp's must not, as it keeps records.

    A session tells the norm of the gradients too, and runs the backward pass of one number.
    """
    shared, stepped, prepared = (leaves(shapes, device) for _ in range(3))
    of_torch = partial(getattr(torch.optim, kind), shared, **arguments)
    ours = partial(getattr(optim, kind), **arguments)
    session = prepare(ParameterList(prepared), ours(prepared), policy="O0", scale=DynamicScale(START))
    loss = torch.zeros((), device=device, requires_grad=True)

    def in_session() -> None:
        session.backward(loss * 1.0)
        session.step()

    return {
        "GradScaler + fused": scaled(torch.amp.GradScaler, of_torch(fused=True), device),
        "GradScaler + foreach": scaled(torch.amp.GradScaler, of_torch(foreach=True), device),
        "preamp.GradScaler + fused": scaled(GradScaler, of_torch(fused=True), device),
        "preamp.GradScaler + preamp.optim": scaled(GradScaler, ours(stepped), device),
        "Session + preamp.optim": in_session,
    }


def with_masters(kind: str, arguments: dict[str, Any], shapes: Shapes, device: torch.device) -> dict[str, Step]:
    """Master weights by hand with torch.amp, the way O2 was written for Apex, against one call of ours."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    low = leaves(shapes, device, dtype)
    masters = [Parameter(leaf.detach().float()) for leaf in low]
    inner = scaled(torch.amp.GradScaler, getattr(torch.optim, kind)(masters, fused=True, **arguments), device)

    @torch.no_grad()
    def by_hand() -> None:
        for leaf, master in zip(low, masters, strict=True):
            master.grad = leaf.grad.float() if leaf.grad is not None else None
        inner()
        torch._foreach_copy_(list[Tensor](low), list[Tensor](masters))

    ours = scaled(GradScaler, getattr(optim, kind)(leaves(shapes, device, dtype), **arguments), device)
    return {"masters by hand": by_hand, "preamp.GradScaler + preamp.optim": ours}


# -- the suite `lists`

COPY = "copying 30 bytes a parameter"
"""The least that O2 has to move without clipping: no step of it can be faster."""
APEX = "apex FusedAdam, masters"
"""It keeps float32 masters of 16-bit parameters itself, takes 16-bit gradients, and writes 16-bit weights."""
RIVALS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    APEX: ("apex", "apex.optimizers", "FusedAdam",
           {"adam_w_mode": False, "capturable": True, "master_weights": True}),
    "bitsandbytes Adam8bit": ("bitsandbytes", "bitsandbytes.optim", "Adam8bit", {}),
    "torchao Adam8bit": ("torchao", "torchao.optim", "Adam8bit", {}),
}  # fmt: skip
"""Optimizers of other libraries: the distribution each comes with, its module and class there, and arguments."""


def rivals() -> dict[str, MakeOptimizer]:
    """Those that this machine has; importing a name proves nothing where preamp stands in for Apex."""

    def make(module: str, kind: str, params: Any, **arguments: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(params, lr=1e-9, **arguments)
        return made

    found: dict[str, MakeOptimizer] = {}
    for name, (package, module, kind, arguments) in RIVALS.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            found[name] = partial(make, module, kind, **arguments)
    return found


def list_rows(setting: Setting) -> Iterator[Row]:
    """Adam on lists; every loss scale is dynamic."""
    first, *others = TINY if setting.tiny else ("BERT-large", "1500 x 100k", "1500 x 1k")
    for name, clip in ((first, None), (first, 1.0), *((other, None) for other in others)):
        title, what = f"Adam, {name}" + ("" if clip is None else ", clipping"), "a step without forward and backward"
        yield Row(suite="lists", name=title, what=what, measure=partial(_race_lists, name, clip), seconds=40)


def _race_lists(name: str, clip: float | None, setting: Setting) -> dict[str, Any]:
    def begin(entry: Entry) -> None:
        entry.begin(warm=6)  # states are made, graphs captured, masters no longer compared with their parameters
        entry.found["launches"] = launches(entry.step)

    problem = Problem((LISTS | TINY)[name][0], setting.device, clip)
    number = 4 if sum(map(math.prod, problem.shapes)) > 1e7 else 10
    entries = [Entry(who, make, number=number) for who, make in problem.makers().items()]
    return {"clip": clip, "contenders": race(entries, replace(setting, rounds=5 * setting.rounds), begin)}


@dataclass(frozen=True)
class Problem:
    """What is asked of the contenders of a row; each has tensors of its own."""

    shapes: Shapes
    device: torch.device
    clip: float | None = None

    def makers(self) -> dict[str, Callable[[ExitStack], Step]]:
        """What makes the step of each contender, the reference first."""
        fp16, bf16, adam = torch.float16, torch.bfloat16, partial(torch.optim.Adam, lr=1e-9)
        made: dict[str, Callable[[ExitStack], Step]] = {
            REFERENCE.name: lambda _: self._by_torch(fp16, partial(adam, fused=True)),
            O2.name: lambda stack: self._by_session(stack, "O2"),
            FOREACH.name: lambda _: self._by_torch(fp16, partial(adam, foreach=True)),
            AMP_BF16.name: lambda _: self._by_torch(bf16, partial(adam, fused=True)),
            REFERENCE_CAPTURED.name: lambda _: Graphed(
                self._by_torch(fp16, partial(adam, fused=True, capturable=True)), self.device
            ),
            CAPTURED.name: lambda stack: self._by_session(stack, "O2", captured=True),
            O5_SPLIT.name: lambda stack: self._by_session(stack, "O5", master="split"),
            O5_EIGHT.name: lambda stack: self._by_session(stack, "O5", master="split", states="8bit"),
            COPY: lambda _: self._copying(30 * sum(map(math.prod, self.shapes))),
        }
        for name, make in rivals().items():
            if name != APEX:
                made[name] = lambda _, make=make: self._by_torch(bf16, make)  # type: ignore[misc]
            elif self.clip is None:  # GradScaler unscales no 16-bit gradients for clipping
                made[name] = lambda _, make=make: self._by_torch(fp16, make, of=fp16)  # type: ignore[misc]
        return made

    def _by_torch(self, dtype: torch.dtype, make: MakeOptimizer, of: torch.dtype = torch.float32) -> Step:
        """Casts are made by one foreach copy each, which is quicker than autocast's own, tensor by tensor.

        The loss is a number of its own: a step scales it and runs backward, since dynamic scaling begins there.
        """
        params, loss = leaves(self.shapes, self.device, of), torch.zeros((), device=self.device, requires_grad=True)
        scaler = torch.amp.GradScaler(self.device.type, init_scale=START, enabled=dtype is torch.float16)
        optimizer, casts, clip = make(params), of is not dtype, self.clip
        weights, wide = [p.detach() for p in params], [p.grad for p in params if p.grad is not None]
        lows, grads = [p.to(dtype) for p in weights], [grad.to(dtype) for grad in wide]

        def go() -> None:
            if casts:
                torch._foreach_copy_(lows, weights)
            scaler.scale(loss).backward()
            if casts:
                torch._foreach_copy_(wide, grads)
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, clip)
            scaler.step(optimizer)
            scaler.update()

        return go

    def _by_session(self, stack: ExitStack, level: str, *, captured: bool = False, **options: Any) -> Step:
        params, loss = leaves(self.shapes, self.device), torch.zeros((), device=self.device, requires_grad=True)
        grads = [p.grad.to(torch.float16 if level == "O2" else torch.bfloat16) for p in params if p.grad is not None]
        for param in params:
            param.grad = None
        holder, scale, clip = ParameterList(params), DynamicScale(START) if level == "O2" else None, self.clip
        optimizer = optim.Adam(holder.parameters(), lr=1e-9, **options)
        session = stack.enter_context(prepare(holder, optimizer, level=level, scale=scale))
        for param, grad in zip(holder.parameters(), grads, strict=True):
            param.grad = grad

        def go() -> None:
            session.backward(loss)
            if clip is not None:
                session.clip_grad_norm_(clip)
            session.step()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PreampWarning)  # on a CPU the step runs as it is written
            return session.capture(go) if captured else go

    def _copying(self, moved: int) -> Step:
        """Of random numbers, to memory that was written before: what nothing has touched need not be there yet."""
        source = torch.rand(moved // 8, device=self.device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)
