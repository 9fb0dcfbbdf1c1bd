"""Lightning Fabric and Accelerate hand out objects of their own: a session on two ranks finds what is behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import preamp

from ..session.toys import squares
from .together import DEVICE, tell

LEVELS = ("O0", "O1", "O2", "O4", "O5")
ORDERS = ("before", "after", "wrapped")
"""`prepare` comes before the framework's setup, after it, or gets what that made."""

MAKERS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-4),
    "preamp": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-4),
}


def train(level: str, maker: str, order: str, setup: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Five steps, one of them skipped, the second half by named optimizer and without synchronisation once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = MAKERS[maker](model.parameters())
    options: dict[str, Any] = {"level": level, "scale": 256.0 if level in ("O1", "O2") else None}
    if order == "before":
        session = preamp.prepare(model, optimizer, **options)
    called, stepped = setup(model, optimizer)
    if order != "before":
        session = preamp.prepare(*((model, optimizer) if order == "after" else (called, stepped)), **options)
    skips = []
    for step in range(5):
        chance = torch.Generator().manual_seed(step)
        for half in range(2):
            x = torch.randn(4, 8, generator=chance)
            if (step, half) == (3, 1):
                x[0, 0] = torch.inf
            with session.no_sync(called) if half == 0 else contextlib.nullcontext():
                synced = [
                    m.require_backward_grad_sync for m in called.modules() if isinstance(m, DistributedDataParallel)
                ]
                assert all(each is (half == 1) for each in synced)
                squares(session, called, x)
        session.clip_grad_norm_(0.5)
        skips.append(session.step(stepped).skipped)
        session.zero_grad(optimizer=stepped)
        session.zero_grad()
    session.close()
    wrapped = any(isinstance(m, DistributedDataParallel) for m in called.modules())
    weights: list[Tensor] = [p.detach() for p in model.parameters()]
    return {"weights": [w.tolist() for w in weights], "skips": skips, "wrapped": wrapped}


def act(folder: Path) -> dict[str, Any]:
    fabric = Fabric(accelerator=DEVICE, devices=2, strategy="ddp")
    fabric.launch()
    accelerate = Accelerator(cpu=DEVICE == "cpu")
    setups: dict[str, Callable[[Any, Any], Any]] = {"Fabric": fabric.setup, "Accelerate": accelerate.prepare}
    told: dict[str, Any] = {}
    for level in LEVELS:
        for maker in MAKERS:
            told[f"{level} {maker}"] = train(level, maker, "before", lambda model, optimizer: (model, optimizer))
            for name, setup in setups.items():
                for order in ORDERS:
                    told[f"{level} {maker} {name} {order}"] = train(level, maker, order, setup)
    return told


pytestmark = pytest.mark.slow  # several processes train for half a minute


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("framework", ["Fabric", "Accelerate"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_framework_around_a_session(
    told: list[dict[str, Any]], level: str, maker: str, framework: str, order: str
) -> None:
    for each in told:
        alone, seen = each[f"{level} {maker}"], each[f"{level} {maker} {framework} {order}"]
        assert seen["wrapped"] and seen["skips"] == alone["skips"] == [False, False, False, True, False]
        assert seen["weights"] == alone["weights"]


if __name__ == "__main__":
    tell(act)
