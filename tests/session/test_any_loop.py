"""Random loops, with what torch lets a loop do between its calls, beside the same loop in plain float32 torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import preamp

from ..rows import over

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.SGD(params, 0.05, momentum=0.5),
    "fused": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-4, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-4),
    "preamp": lambda params: preamp.optim.SGD(params, 0.05, momentum=0.5),
}
SEEDS = 6


class Plain:
    """The loop in torch alone."""

    def __init__(self, maker: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        if type(self) is Plain:
            maker = "foreach" if maker == "fused" else "torch"
        self.optimizer = MAKERS[maker](self.model.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self, norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def make_true(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()

    def evaluate(self, x: Tensor, how: str) -> None:
        with torch.no_grad():
            self.model(x)

    def clear(self, how: str) -> None:
        if how == "by hand":
            for parameter in self.model.parameters():
                parameter.grad = None
        else:
            whose = self.model if "model" in how else self.optimizer
            whose.zero_grad(set_to_none="zero" not in how)

    def states(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, states: Any) -> None:
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])


class Prepared(Plain):
    def __init__(self, maker: str, level: str) -> None:
        super().__init__(maker)
        scale = preamp.DynamicScale(init_scale=16.0, growth_interval=2, max_scale=64.0)
        self.session = preamp.prepare(self.model, self.optimizer, level=level, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        with self.session.autocast():
            return self.model(x).float().square().mean()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        self.session.backward(loss)

    def clip(self, norm: float) -> None:
        self.session.clip_grad_norm_(norm)

    def make_true(self) -> None:
        self.session.unscale_()

    def step(self) -> None:
        assert not self.session.step().skipped

    def evaluate(self, x: Tensor, how: str) -> None:
        with torch.no_grad():
            if how == "region":
                with self.session.autocast():
                    self.model(x)
            else:
                with self.session.full_precision():
                    self.model(x)

    def clear(self, how: str) -> None:
        if how == "session":
            self.session.zero_grad()
        else:
            super().clear(how)

    def states(self) -> Any:
        return copy.deepcopy((*super().states(), self.session.state_dict()))

    def load(self, states: Any) -> None:
        super().load(states)
        self.session.load_state_dict(states[2])


CLEARS = ("optimizer", "optimizer, to zero", "model", "model, to zero", "by hand", "session")


def play(run: Plain, seed: int) -> list[Tensor]:
    """One loop; the same for every run with this seed."""
    chance, saved = random.Random(seed), None
    data = torch.Generator().manual_seed(seed)
    early = chance.random() < 0.3  # zero_grad() right before backward
    for _ in range(12):
        if not early and chance.random() < 0.2:
            run.clear(chance.choice(CLEARS))
        for i in range(passes := chance.randint(1, 3)):
            loss = run.forward(torch.randn(8, 6, generator=data))
            if early and i == 0:
                run.clear(chance.choice(CLEARS))
            if chance.random() < 0.15:
                run.evaluate(torch.randn(8, 6, generator=data), chance.choice(["region", "full precision"]))
            run.backward(loss)
            if chance.random() < 0.2:
                run.clip(chance.choice([0.05, 0.5]))
            if saved is not None and i + 1 < passes and chance.random() < 0.2:
                run.load(copy.deepcopy(saved))
        true = chance.random() < 0.4
        if true:
            run.make_true()
            if chance.random() < 0.5:
                for parameter in run.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
        if chance.random() < 0.3:
            run.clip(0.3)
        if chance.random() < 0.2:
            run.evaluate(torch.randn(8, 6, generator=data), chance.choice(["region", "full precision"]))
        if chance.random() < 0.1:
            run.model[0].bias.grad = None
        if chance.random() < 0.25:  # given up
            if not early or chance.random() < 0.5:
                run.clear(chance.choice(CLEARS))
            continue
        run.step()
        if chance.random() < 0.2:
            saved = run.states()
        if not early and chance.random() < 0.85:
            run.clear(chance.choice(CLEARS))
        if saved is not None and chance.random() < 0.2:
            run.load(copy.deepcopy(saved))  # an optimizer of torch goes on in the tensors that it is given
        if chance.random() < 0.1:
            with torch.no_grad():
                run.model[3].weight.mul_(0.9)
    if isinstance(run, Prepared):
        run.session.close()
    return [p.detach() for p in run.model.parameters()]


@over(level=["O0", "O1", "O2", "O4", "O5"], maker=[maker for maker in MAKERS if maker != "foreach"])
def test_random_loops(level: str, maker: str) -> None:
    rough = {"O0": 1e-5, "O1": 2e-2, "O2": 2e-2, "O4": 4e-2, "O5": 6e-2}[level]
    for seed in range(list(MAKERS).index(maker) % 2, SEEDS, 2):  # each level plays them all
        start = [p.detach().clone() for p in Plain(maker).model.parameters()]
        expected, found = play(Plain(maker), seed), play(Prepared(maker, level), seed)
        moved = torch.cat([(a - b).flatten() for a, b in zip(expected, start, strict=True)]).norm()
        apart = torch.cat([(a - b).flatten() for a, b in zip(expected, found, strict=True)]).norm()
        assert apart <= rough * moved + 1e-6, (seed, float(apart / moved))
