"""Two models, optimizers and losses (a GAN's loop, in any order) under DistributedDataParallel and FSDP2, and alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp
from preamp.sharding import full_tensor

from ..combined.training import GROWS, differences
from .together import DEVICE, tell, told_by

KINDS = ("ddp", "late ddp", "fsdp")
LEVELS = ("O0", "O1", "O2", "O4", "O5")
MAKERS: dict[str, Any] = {
    "Adam": lambda params: preamp.optim.Adam(params, 1e-3, eps=1e-4),
    "SGD": lambda params: preamp.optim.SGD(params, 0.05, momentum=0.5),
    "torch Adam, fused": lambda params: torch.optim.Adam(params, 1e-3, eps=1e-4, fused=True),
    "torch RMSprop": lambda params: torch.optim.RMSprop(params, 1e-3, eps=1e-4),
}


def made() -> dict[str, nn.Module]:
    """A generator and a critic."""
    torch.manual_seed(1)
    g = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
    return {"g": g, "d": nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))}


class Rivals:
    """Both, each with an optimizer and a loss, in one session; `apart`: each loss with a scale of its own."""

    def __init__(self, kind: str | None, mesh: Any, level: str, makers: list[str], scale: str, apart: bool) -> None:
        self.models, self.drawn, self.apart = made(), 0, apart
        self.told: list[float | bool] = []
        if kind == "fsdp":
            options: dict[str, Any] = {} if level == "O0" else {"mp_policy": preamp.policy(level).fsdp()}
            for model in self.models.values():
                for part in (model[0], model):  # type: ignore[index]
                    fully_shard(part, mesh=mesh, **options)
        pairs = zip(self.models.items(), makers, strict=True)
        self.optimizers = {name: MAKERS[maker](model.parameters()) for (name, model), maker in pairs}
        self.called: dict[str, Any] = dict(self.models)
        if kind == "ddp":
            self.called = {name: DistributedDataParallel(model) for name, model in self.models.items()}
        losses = ("g", "d") if apart else ("loss",)
        scales = {name: GROWS[scale]() for name in losses} if level in ("O1", "O2") else None
        self.session = preamp.prepare(self.models, self.optimizers, level=level, losses=losses, scale=scales)
        if kind == "late ddp":
            self.called = {name: DistributedDataParallel(model) for name, model in self.models.items()}
        self.late = self.called.values() if kind == "late ddp" else ()

    def draw(self, columns: int, sick: bool) -> Tensor:
        self.drawn += 1
        drawn = torch.randn(6, columns, generator=torch.Generator().manual_seed(self.drawn))
        drawn[0, 0] = torch.inf if sick else drawn[0, 0]
        return drawn

    def backward(self, which: str, *, sick: bool = False, detached: bool = True, sync: bool = True) -> None:
        """Of the critic's loss or of the generator's, which goes through the critic."""
        with self.session.autocast():
            if which == "d":
                real, noise = self.draw(8, sick), self.draw(4, False)
                with torch.no_grad() if detached else nullcontext():
                    fake = self.called["g"](noise)
                judged = self.called["d"](torch.cat([real, fake.float()])).float()
                loss = F.softplus(-judged[:6]).mean() + F.softplus(judged[6:]).mean()
            else:
                loss = F.softplus(-self.called["d"](self.called["g"](self.draw(4, sick))).float()).mean()
        self.session.backward(loss, name=which if self.apart else None, sync=sync)
        self.told.append(loss.item())

    def clip(self, most: float, which: str | None = None) -> None:
        optimizer = None if which is None else self.optimizers[which]
        self.told.append(float(self.session.clip_grad_norm_(most, optimizer=optimizer)))

    def step(self, which: str | None = None) -> None:
        self.told.append(self.session.step(None if which is None else self.optimizers[which]).skipped)

    def end(self) -> dict[str, Any]:
        with self.session.full_precision(values_only=True):
            weights = {f"{m} {n}": full_tensor(v) for m in self.models for n, v in self.models[m].state_dict().items()}
        scales = [self.session.loss_scale(name) for name in self.session._losses]
        return {"told": self.told, "weights": copy.deepcopy(weights), "scales": scales, "skips": self.session.skipped}


def critic(run: Rivals) -> None:
    run.backward("d")
    run.step("d")


def critic_goes_through_the_generator(run: Rivals) -> None:
    run.backward("d", detached=False)
    run.clip(0.2, "d")
    run.step("d")


def critic_accumulates(run: Rivals) -> None:
    with run.session.no_sync(*run.late):
        run.backward("d", sync=False)
    run.backward("d")
    run.step("d")


def critic_is_sick(run: Rivals) -> None:
    run.backward("d", sick=True)
    run.step("d")


def generator(run: Rivals) -> None:
    run.backward("g")
    run.clip(0.05, "g")
    run.step("g")


def generator_is_sick(run: Rivals) -> None:
    run.backward("g", sick=True)
    run.step("g")


def both_at_once(run: Rivals) -> None:
    run.backward("d", detached=False)
    run.backward("g")
    run.clip(0.2)
    run.step()


def both_one_after_the_other(run: Rivals) -> None:
    run.backward("d")
    run.backward("g")
    run.step("g")
    run.step("d")


def both_with_one_sick(run: Rivals) -> None:
    run.backward("d")
    run.backward("g", sick=True)
    run.step()


def both_edited(run: Rivals) -> None:
    run.backward("g")
    run.session.unscale_(run.optimizers["g"])
    for p in run.models["g"].parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    run.step()


STEPS: tuple[Callable[[Rivals], None], ...] = (
    critic, critic_goes_through_the_generator, critic_accumulates, critic_is_sick, generator, generator_is_sick,
    both_at_once, both_one_after_the_other, both_with_one_sick, both_edited,
)  # fmt: skip


def apart(level: str, one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two runs differ by more than the rounding of gradients that are added in another order."""
    allowed = 1e-4 if level == "O0" else 6e-2
    start = {f"{m} {n}": v for m, model in made().items() for n, v in model.state_dict().items()}
    pairs = [(v, other["weights"][n], start[n]) for n, v in one["weights"].items()]
    far = sum(float((a - b).double().square().sum()) for a, b, _ in pairs) ** 0.5
    way = sum(float((a - s).double().square().sum()) for a, _, s in pairs) ** 0.5
    found = [] if far <= allowed * way + 1e-7 else [f"weights: {far:.2g} of {way:.2g}"]
    for a, b in zip(one["told"], other["told"], strict=True):
        if (a is not b) if isinstance(a, bool) else (a == a and abs(a - b) > 2 * allowed * abs(a)):
            found.append(f"told: {a}, {b}")
    return found + [name for name in ("scales", "skips") if one[name] != other[name]]


def act(_: Path) -> dict[str, Any]:
    mesh, found = init_device_mesh(DEVICE, (2,)), {}
    for seed in range(30):
        chance, kind = random.Random(seed), KINDS[seed % len(KINDS)]
        level = chance.choice(LEVELS)
        how = level, chance.choices(list(MAKERS), k=2), chance.choice(list(GROWS)), chance.random() < 0.6
        steps = chance.choices(STEPS, k=7)
        ends = []
        for each in (None, kind):
            run = Rivals(each, mesh, *how)
            with run.session:
                for step in steps:
                    step(run)
                    run.session.zero_grad()
                ends.append(run.end())
        exact = kind != "fsdp" and level != "O2"  # where halves of 16-bit gradients are not lost
        name = f"{kind} {how} {[step.__name__ for step in steps]}"
        found[name] = differences(*ends) if exact else apart(level, *ends)
    return found


@pytest.mark.slow
def test_two_losses_on_two_ranks_train_as_on_one_process(tmp_path: Path) -> None:
    for told in told_by("test_rivals", 2, tmp_path):
        assert len(told) == 30 and {name: found for name, found in told.items() if found} == {}


if __name__ == "__main__":
    tell(act)
