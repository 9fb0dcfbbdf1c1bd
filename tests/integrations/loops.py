"""What the tests of frameworks train: a small network on fixed batches, one of which overflows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import preamp

MAKERS: dict[str, Any] = {
    "preamp": lambda params: preamp.optim.AdamW(params, 1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-4, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
}
CASES = [*((level, "preamp") for level in ("O0", "O1", "O2", "O3", "O4", "O5")), ("O2", "fused"), ("O5", "foreach")]

STEPS, MICRO, CLIP = 30, 2, 0.05
BAD = 7
"""The step whose first micro-batch overflows."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


@cache
def data() -> list[tuple[Tensor, Tensor]]:
    """Batches of four, `MICRO` for each step."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(STEPS * MICRO)
    ]
    rows[BAD * MICRO] = (rows[BAD * MICRO][0] * float("inf"), rows[BAD * MICRO][1])
    return rows


def schedule_of(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that falls at each step that is not skipped."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


class Trained(NamedTuple):
    """What a loop that knows sessions comes to."""

    state: dict[str, Any]
    parameters: list[Tensor]
    rates: list[float]
    losses: list[float]


def by_torch(clip: Callable[..., Any], limit: float) -> Callable[[preamp.Session, nn.Module], Any]:
    return lambda session, model: (session.unscale_(), clip(model.parameters(), limit))


CLIPS: dict[str, Callable[[preamp.Session, nn.Module], Any]] = {
    "session": lambda session, model: session.clip_grad_norm_(CLIP),
    "session, true": lambda session, model: (session.unscale_(), session.clip_grad_norm_(CLIP)),
    "norm": by_torch(nn.utils.clip_grad_norm_, CLIP), "value": by_torch(nn.utils.clip_grad_value_, CLIP / 10),
    "": lambda session, model: None,
}  # fmt: skip


@cache
def plain(
    level: str, kind: str, clip: str = "norm", *, steps: int = STEPS, scheduled: bool = True, low: tuple[str, ...] = ()
) -> Trained:
    """`low`: levels at which the wanted outputs are in 16 bits, too."""
    model = network()
    optimizer = MAKERS[kind](model.parameters())
    schedule = schedule_of(optimizer) if scheduled else None
    rates, losses = [], []
    with preamp.prepare(model, optimizer, level=level) as session:
        for i in range(steps):
            for x, y in data()[i * MICRO : (i + 1) * MICRO]:
                with session.autocast():
                    predicted = model(x).float()
                loss = nn.functional.mse_loss(predicted, y.to(session.policy.params).float() if level in low else y)
                session.backward(loss / MICRO)
                losses.append(loss.item())
            CLIPS[clip](session, model)
            if not session.step().skipped and schedule is not None:
                schedule.step()
            session.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        state = copy.deepcopy(session.state_dict())
        return Trained(state, [p.detach().clone() for p in model.parameters()], rates, losses)
