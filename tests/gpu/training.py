"""What the tests of steps on a CUDA device train, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp

DEVICE = "cuda"
STEPS = 24

EPS = 1e-3
"""Of Adam: with the usual 1e-8 a gradient that is rounding and nothing else makes a whole step, up or down."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "preamp.optim.AdamW": lambda p: preamp.optim.AdamW(p, 3e-3, eps=EPS),
    "preamp.optim.SGD": lambda p: preamp.optim.SGD(p, 0.05, momentum=0.9),
    "torch AdamW, fused": lambda p: torch.optim.AdamW(p, 3e-3, eps=EPS, fused=True, capturable=True),
    "torch SGD, fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
}
SPLIT = "preamp.optim.AdamW, split"
MAKERS = {**OPTIMIZERS, SPLIT: lambda p: preamp.optim.AdamW(p, 3e-3, eps=EPS, master="split")}
CASES = [(level, name) for level in ("O1", "O2", "O4", "O5") for name in OPTIMIZERS] + [("O5", SPLIT)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Waits of the host for a CUDA device are errors inside."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def network() -> nn.Sequential:
    """Without BatchNorm, whose running statistics a batch with an infinity would spoil for good, and smooth: rounding
    that puts a ReLU on the other side of zero tells two runs apart that are the same.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).to(DEVICE)


def batch(step: int, size: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(step)
    x = torch.randn(size, 64, device=DEVICE, generator=generator)
    return x, x[:, :8].argmax(1)


def spoiled(step: int, bad: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x, y = batch(step)
    if step in bad:
        x[0, 0] = torch.inf
    return x, y


def scaled(level: str) -> dict[str, Any]:
    """A scale so low that no step is skipped but those that are meant to be."""
    return {"scale": preamp.DynamicScale(2.0**10)} if level in ("O1", "O2") else {}


def train_step(model: nn.Module, session: preamp.Session, clip: float | None = 1.0) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with session.autocast():
            loss = F.cross_entropy(model(x), y)
        session.backward(loss)
        if clip is not None:
            session.clip_grad_norm_(clip)
        session.step()
        session.zero_grad()
        return loss.detach()

    return step


def captured(
    take: Callable[[list[Tensor]], object], params: list[Tensor], dtype: torch.dtype, warm: Callable[[], None]
) -> Callable[[list[Tensor]], None]:
    """Replays, for other gradients, a graph of `take`, which gets them; `warm` runs on a side stream before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream().wait_stream(side)
    source = [torch.zeros_like(p, dtype=dtype) for p in params]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take([s * 1 for s in source])

    def replay(grads: list[Tensor]) -> None:
        for s, grad in zip(source, grads, strict=True):
            s.copy_(grad)
        graph.replay()

    return replay
