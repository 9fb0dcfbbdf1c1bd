"""What precision costs beside forward and backward: casts, check, unscaling, clipping, the optimizer step."""

from __future__ import annotations

import importlib
import importlib.metadata
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ... import optim
from ...errors import PreampWarning
from ...scaling import DynamicScale
from ...session import Session, prepare
from .._counting import counted_launches
from .._race import race
from .._results import Row, failure
from .._step_suite import LISTS, TINY
from ._by_hand import Graphed
from ._measure import Speeds, Tell, free_memory, quiet


@dataclass(frozen=True, kw_only=True)
class Rival:
    """An optimizer of another library. `masters`: whether it keeps float32 masters of 16-bit parameters itself."""

    name: str
    package: str
    """The distribution it comes with; importing a name proves nothing where preamp stands in for Apex."""
    module: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    masters: bool = False

    def make(self, params: Sequence[Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer over `params`."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        made: torch.optim.Optimizer = kind(params, lr=lr, **self.arguments)
        return made


RIVALS = (
    Rival(
        name="apex FusedAdam, masters", package="apex", module="apex.optimizers", kind="FusedAdam", masters=True,
        arguments={"adam_w_mode": False, "capturable": True, "master_weights": True},
    ),
    Rival(name="bitsandbytes Adam8bit", package="bitsandbytes", module="bitsandbytes.optim", kind="Adam8bit"),
    Rival(name="torchao Adam8bit", package="torchao", module="torchao.optim", kind="Adam8bit"),
)  # fmt: skip


def installed() -> list[Rival]:
    """Those that this machine has."""
    found = []
    for rival in RIVALS:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(rival.package)
            found.append(rival)
    return found


Step = Callable[[], Any]

LISTS_BY_SIZE: dict[str, tuple[str, ...]] = {"full": ("BERT-large", "1500 x 100k", "1500 x 1k"), "tiny": tuple(TINY)}
SHAPES: dict[str, list[tuple[int, ...]]] = {name: shapes for name, (shapes, _) in (LISTS | TINY).items()}

REFERENCE, FOREACH, BF16 = "torch.amp fp16", "torch.amp fp16, foreach", "torch.amp bf16"
O2, SPLIT, EIGHT = "preamp O2", "preamp O5, split masters", "preamp O5, split masters, 8-bit states"
REFERENCE_CAPTURED, CAPTURED = f"{REFERENCE}, captured", f"{O2}, captured"

LEAST_BYTES = {
    REFERENCE: 52, REFERENCE_CAPTURED: 52, FOREACH: 92, BF16: 40, O2: 30, CAPTURED: 30, SPLIT: 26, EIGHT: 14,
}  # fmt: skip
"""Bytes a parameter that each has to move without clipping; Adam keeps two moments."""

START = 1.0
"""Where the dynamic scales of all contenders start: gradients are unscaled in place by some, and must not shrink."""


@dataclass
class _Problem:
    """The tensors that every contender has of its own, and what is asked of it. `sessions` were opened for it."""

    shapes: list[tuple[int, ...]]
    device: torch.device
    clip: float | None
    sessions: list[Session] = field(default_factory=list)

    def tensors(self, dtype: torch.dtype) -> tuple[list[Parameter], list[Tensor]]:
        """Float32 parameters and low gradients, of a seed."""
        torch.manual_seed(0)
        params = [Parameter(torch.randn(shape, device=self.device) * 0.02) for shape in self.shapes]
        grads = [torch.randn(shape, device=self.device).mul_(1e-3).to(dtype) for shape in self.shapes]
        return params, grads

    def loss(self) -> Tensor:
        """What stands for a loss: a step scales it and runs backward, since dynamic scaling begins there."""
        return torch.zeros((), device=self.device, requires_grad=True)


def speeds(device: torch.device, size: str) -> Speeds:
    """Copy bandwidth and the rate of a bfloat16 product of random matrices: what everything is held against."""
    full = size == "full"
    source = torch.rand(2**30 if full else 2**16, device=device)
    target = torch.zeros_like(source)  # written, too: memory that nothing has touched need not be there yet
    side = 8192 if full else 64
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _median(lambda: target.copy_(source), device), _median(lambda: a @ b, device)
    return Speeds(copy=2 * 4 * source.numel() / seconds[0], product=2 * side**3 / seconds[1])


def _median(work: Step, device: torch.device) -> float:
    (outcome,) = race({"work": work}, rounds=7, number=10, device=device)
    return statistics.median(outcome.seconds)


def optimizer_row(
    name: str, device: torch.device, rounds: int, found: Speeds | None, *, clip: float | None = None,
    tell: Tell = quiet,
) -> Row:  # fmt: skip
    """One step of Adam on a list of tensors by each contender, with the casts of weights and gradients around it.

    Every loss scale is dynamic. torch's casts are made by one foreach copy each, which is quicker than autocast's own,
    tensor by tensor; with masters written by hand, as O2 was for Apex, a step does the same.
    """
    problem = _Problem(SHAPES[name], device, clip)
    entries = sum(torch.Size(shape).numel() for shape in problem.shapes)
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for contender, make in _makers(problem).items():
        try:
            step = make()
            for _ in range(6):  # states are made, graphs captured, masters no longer compared with their parameters
                step()
            steps[contender] = step
        except Exception as error:
            failed[contender] = failure(contender, error, tell)
            free_memory()
    results: list[dict[str, Any]] = []
    try:
        outcomes = race(steps, rounds=rounds, number=4 if entries > 1e7 else 10, device=device) if steps else []
        for outcome in outcomes:
            results.append({**outcome.to_dict(), **counted_launches(steps[outcome.name])})
            if found is not None and clip is None and outcome.name in LEAST_BYTES:
                least = LEAST_BYTES[outcome.name] * entries / found.copy
                results[-1]["roofline"] = least / statistics.median(outcome.seconds)
            if REFERENCE in failed:
                results[-1]["ratio"] = None
    finally:
        for session in problem.sessions:
            session.close()
    results += [{"name": contender, "error": why} for contender, why in failed.items()]
    title = f"Adam, {name}" + ("" if clip is None else ", clipping")
    what = "scaling, casts of weights and gradients, check, unscaling, step; dynamic scales"
    about = {"parameters": entries, "list": name, "clip": clip}
    return Row(part="optimizer", name=title, what=what, contenders=results, about=about)


def _makers(problem: _Problem) -> dict[str, Callable[[], Step]]:
    adam, fp16 = torch.optim.Adam, torch.float16
    capturable = partial(adam, lr=1e-9, fused=True, capturable=True)
    makers: dict[str, Callable[[], Step]] = {
        REFERENCE: lambda: _torchs(problem, partial(adam, lr=1e-9, fused=True), fp16),
        O2: lambda: _ours(problem),
        FOREACH: lambda: _torchs(problem, partial(adam, lr=1e-9, foreach=True), fp16),
        BF16: lambda: _torchs(problem, partial(adam, lr=1e-9, fused=True), torch.bfloat16),
        REFERENCE_CAPTURED: lambda: Graphed(_torchs(problem, capturable, fp16), problem.device),
        CAPTURED: lambda: _ours(problem, captured=True),
        SPLIT: lambda: _ours(problem, master="split"),
        EIGHT: lambda: _ours(problem, master="split", states="8bit"),
    }
    for rival in installed():
        if not rival.masters:
            makers[rival.name] = lambda rival=rival: _torchs(problem, partial(rival.make, lr=1e-9), torch.bfloat16)  # type: ignore[misc]
        elif problem.clip is None:  # GradScaler unscales no 16-bit gradients for clipping
            makers[rival.name] = lambda rival=rival: _with_masters(problem, rival)  # type: ignore[misc]
    return makers


def _torchs(problem: _Problem, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype) -> Step:
    params, grads = problem.tensors(dtype)
    lows = [torch.empty_like(p, dtype=dtype) for p in params]
    optimizer, loss, device = make(params), problem.loss(), problem.device
    scaler = torch.amp.GradScaler(device.type, init_scale=START, enabled=dtype is torch.float16)
    weights: list[Tensor] = [p.detach() for p in params]
    wide: list[Tensor] = [torch.empty_like(p) for p in params]
    for param, grad in zip(params, wide, strict=True):
        param.grad = grad

    def go() -> None:
        torch._foreach_copy_(lows, weights)
        scaler.scale(loss).backward()
        torch._foreach_copy_(wide, grads)
        if problem.clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, problem.clip)
        scaler.step(optimizer)
        scaler.update()

    return go


def _with_masters(problem: _Problem, rival: Rival) -> Step:
    """An optimizer that takes 16-bit gradients and writes 16-bit weights by itself, under torch's scaler."""
    params, grads = problem.tensors(torch.float16)
    lows = [Parameter(p.detach().half()) for p in params]
    for low, grad in zip(lows, grads, strict=True):
        low.grad = grad
    optimizer, loss = rival.make(lows, lr=1e-9), problem.loss()
    scaler = torch.amp.GradScaler(problem.device.type, init_scale=START)

    def go() -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return go


def _ours(problem: _Problem, *, captured: bool = False, **options: Any) -> Step:
    params, grads = problem.tensors(torch.bfloat16 if options else torch.float16)
    holder, loss = nn.ParameterList(params), problem.loss()
    optimizer = optim.Adam(holder.parameters(), lr=1e-9, **options)
    level, scale = ("O5", None) if options else ("O2", DynamicScale(START))
    session = prepare(holder, optimizer, level=level, scale=scale)
    problem.sessions.append(session)
    for param, grad in zip(holder.parameters(), grads, strict=True):
        param.grad = grad

    def go() -> None:
        session.backward(loss)
        if problem.clip is not None:
            session.clip_grad_norm_(problem.clip)
        session.step()

    if not captured:
        return go
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreampWarning)  # on a CPU the step runs as it is written
        return session.capture(go)
