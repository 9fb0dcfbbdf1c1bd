"""What precision costs beside forward and backward: casts, check, unscaling, clipping, the optimizer's step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ... import optim
from ...session import Session, prepare
from .._counting import launches
from .._race import race
from .._step_suite import LISTS
from ._measure import Speeds, described, free
from ._rows import TrainingRow

Step = Callable[[], None]

LISTS_BY_SIZE: dict[str, tuple[str, ...]] = {
    "full": ("BERT-large", "1500 x 100k", "1500 x 1k"),
    "tiny": ("8 x 60",),
}
SHAPES: dict[str, list[tuple[int, ...]]] = {"8 x 60": [(6, 10)] * 8, **{name: LISTS[name][0] for name in LISTS}}

REFERENCE, FOREACH, BF16 = "torch.amp fp16", "torch.amp fp16, foreach", "torch.amp bf16"
O2, SPLIT, EIGHT = "preamp O2", "preamp O5, split masters", "preamp O5, split masters, 8-bit states"

LEAST_BYTES = {REFERENCE: 52, FOREACH: 92, BF16: 40, O2: 30, SPLIT: 26, EIGHT: 14}
"""Bytes a parameter that each has to move without clipping: see `facts` of the design; Adam keeps two moments."""


def speeds(device: torch.device, size: str) -> Speeds:
    """Copy bandwidth and the rate of a bfloat16 product of random matrices: what everything is held against."""
    full = size == "full"
    source = torch.empty(2**30 if full else 2**16, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    side = 8192 if full else 64
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = _best(lambda: target.copy_(source), device), _best(lambda: a @ b, device)
    return Speeds(copy=2 * 4 * source.numel() / seconds[0], product=2 * side**3 / seconds[1])


def _best(work: Callable[[], Any], device: torch.device) -> float:
    (outcome,) = race({"work": work}, rounds=5, number=10, device=device)
    return statistics.median(outcome.seconds)


def optimizer_row(
    name: str, device: torch.device, rounds: int, found: Speeds | None, *, clip: float | None = None
) -> TrainingRow:
    """One step of Adam on a list of tensors by each contender, with the casts of weights and gradients around it.

    torch's casts are made by one foreach copy each, which is quicker than autocast's own, tensor by tensor.
    """
    shapes = SHAPES[name]
    entries = sum(torch.Size(shape).numel() for shape in shapes)
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    sessions: list[Session] = []
    for contender in (REFERENCE, O2, FOREACH, BF16, SPLIT, EIGHT):
        try:
            made = _ours(contender, shapes, device, clip, sessions) if contender in (O2, SPLIT, EIGHT) else None
            step = made or _torchs(contender, shapes, device, clip)
            for _ in range(6):  # states are made, masters are no longer compared with their parameters
                step()
            steps[contender] = step
        except Exception as error:
            failed[contender] = described(error)
            free()
    told: list[dict[str, Any]] = []
    try:
        outcomes = race(steps, rounds=rounds, number=4 if entries > 1e7 else 10, device=device) if steps else []
        for outcome in outcomes:
            counted = launches(steps[outcome.name])
            told.append({**outcome.to_dict(), "launches": counted})
            if found is not None and clip is None:
                least = LEAST_BYTES[outcome.name] * entries / found.copy
                told[-1]["roofline"] = least / statistics.median(outcome.seconds)
            if REFERENCE in failed:
                told[-1]["ratio"] = None
    finally:
        for session in sessions:
            session.close()
    told += [{"name": contender, "error": why} for contender, why in failed.items()]
    title = f"Adam, {name}" + ("" if clip is None else ", clipping")
    what = "casts of weights and gradients, check, unscaling, step"
    about = {"parameters": entries, "list": name, "clip": clip}
    return TrainingRow(part="optimizer", name=title, what=what, contenders=told, about=about)


def _torchs(contender: str, shapes: Sequence[tuple[int, ...]], device: torch.device, clip: float | None) -> Step:
    dtype = torch.bfloat16 if contender == BF16 else torch.float16
    params, lows, grads = _tensors(shapes, device, dtype)
    how: dict[str, Any] = {"foreach": True} if contender == FOREACH else {"fused": True}
    optimizer = torch.optim.Adam(params, lr=1e-9, **how)
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0, enabled=contender != BF16)
    scaler.scale(torch.zeros((), device=device))
    weights: list[Tensor] = [p.detach() for p in params]
    wide: list[Tensor] = [torch.empty_like(p) for p in params]
    for param, grad in zip(params, wide, strict=True):
        param.grad = grad

    def go() -> None:
        torch._foreach_copy_(lows, weights)
        torch._foreach_copy_(wide, grads)
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()

    return go


def _ours(
    contender: str, shapes: Sequence[tuple[int, ...]], device: torch.device, clip: float | None,
    sessions: list[Session],
) -> Step:  # fmt: skip
    split = contender in (SPLIT, EIGHT)
    params, _, grads = _tensors(shapes, device, torch.bfloat16 if split else torch.float16)
    holder = nn.ParameterList(params)
    options: dict[str, Any] = {"master": "split"} if split else {}
    if contender == EIGHT:
        options["states"] = "8bit"
    optimizer = optim.Adam(holder.parameters(), lr=1e-9, **options)
    session = prepare(holder, optimizer, level="O5" if split else "O2", scale=None if split else 2.0)
    sessions.append(session)
    for param, grad in zip(holder.parameters(), grads, strict=True):
        param.grad = grad
    loss = torch.zeros((), device=device, requires_grad=True)  # a step wants a backward before it

    def go() -> None:
        session.backward(loss)
        if clip is not None:
            session.clip_grad_norm_(clip)
        session.step()

    return go


def _tensors(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> tuple[list[Parameter], list[Tensor], list[Tensor]]:
    """Float32 parameters, low ones like them, and low gradients."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    lows = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    grads = [torch.randn(shape, dtype=torch.float32, device=device).mul_(1e-3).to(dtype) for shape in shapes]
    return params, lows, grads
