"""A training run whose every part is made by name, for tests that compare two of them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import preamp

GROWS = {
    "dynamic": lambda: preamp.DynamicScale(256.0, growth_interval=3),
    "hysteresis": lambda: preamp.HysteresisScale(256.0, growth_interval=3),
    "static": lambda: preamp.StaticScale(64.0),
}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, each of which begins with a norm: what is float32 at every level stands for what is not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [params[3], *params[:3], params[4]]}, {"params": params[5:], "lr": 2e-3, "weight_decay": 0.01}]


def _adamw(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: preamp.optim.AdamW(_groups(model), 1e-3, eps=1e-4, **options)


def _torch(name: str, lr: float, **options: Any) -> Callable[[nn.Module], Any]:
    """One by one: on a GPU torch would step tensors and DTensors together, which it cannot."""
    options = {"foreach": False, **options}
    return lambda model: getattr(torch.optim, name)(_groups(model), lr, **options)


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: preamp.optim.SGD(_groups(model), 0.05, momentum=0.5, dampening=0.1),
    "SGD, Nesterov": lambda model: preamp.optim.SGD(_groups(model), 0.05, momentum=0.5, nesterov=True),
    "AdamW": _adamw(),
    "AdamW, split": _adamw(master="split"),
    "AdamW, 8 bits": _adamw(states="8bit"),
    "AdamW, by chance": _adamw(master=None, rounding="stochastic"),
    "LAMB": lambda model: preamp.optim.LAMB(_groups(model), 1e-2, eps=1e-4),
    "NovoGrad": lambda model: preamp.optim.NovoGrad(_groups(model), 1e-2, eps=1e-4),
    "Adagrad": lambda model: preamp.optim.Adagrad(_groups(model), 1e-2, eps=1e-4),
    "torch SGD": _torch("SGD", 0.05, momentum=0.5, dampening=0.1),
    "torch AdamW": _torch("AdamW", 1e-3, eps=1e-4, amsgrad=True, foreach=True),
    "torch AdamW, fused": _torch("AdamW", 1e-3, eps=1e-4, fused=True),
    "torch RMSprop": _torch("RMSprop", 1e-3, eps=1e-4, momentum=0.3),
    "torch Adadelta": _torch("Adadelta", 1.0, eps=1e-4),
    "torch Adafactor": _torch("Adafactor", 1e-2),
}


class Net(nn.Module):
    """Shared weights, batch norm, dropout, a convolution, a frozen layer, a buffer: what states are easily lost of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.norm = nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16)
        self.batch_norm, self.drop, self.second = nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.conv, self.last, self.head = nn.Conv1d(1, 4, 3), nn.Linear(16, 4), nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("third", torch.tensor([1 / 3]))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        words = self.words((x[:, 0].abs() * 7).long() % 20)
        hidden = self.batch_norm(self.norm(nn.functional.gelu(self.first(x + words))))
        hidden = hidden + self.frozen(self.second(self.drop(hidden))) * self.third
        seen = self.conv(hidden.unsqueeze(1)).mean((1, 2))
        parts = self.last(hidden), self.head(words) * 0.3, seen
        return torch.stack([part.float().square().mean() for part in parts]).sum()


class Training:
    """A model, an optimizer, a schedule and a session, and what they told."""

    def __init__(self, level: str, maker: str, scale: str) -> None:
        self.how = level, maker, scale
        self.drawn = 0
        self.told: list[Any] = []
        self.build()

    def build(self) -> None:
        self.model = self.made()
        self.optimizer = MAKERS[self.how[1]](self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.95**step)
        self.prepare()

    def made(self) -> Net:
        """The model, as the optimizer gets its parameters."""
        return Net()

    def forward(self, x: Tensor) -> Tensor:
        """The loss; whoever wraps the model calls the wrapper."""
        return self.model(x)

    def prepare(self) -> None:
        level, maker, scale = self.how
        policy = "O5,masters=no" if (level, maker) == ("O5", "AdamW, by chance") else level
        made = GROWS[scale]() if level in ("O1", "O2") else None
        self.session = preamp.prepare(self.model, self.optimizer, policy=policy, scale=made)

    def batch(self) -> Tensor:
        self.drawn += 1
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(self.drawn))

    def loss(self, x: Tensor) -> Tensor:
        with self.session.autocast():
            return self.forward(x)

    def backward(self, x: Tensor | None = None, **how: bool) -> None:
        loss = self.loss(self.batch() if x is None else x)
        self.session.backward(loss, **how)
        self.told.append(loss.item())

    def finish(self) -> None:
        skipped = self.session.step().skipped
        self.told.append(skipped)
        if not skipped:
            self.schedule.step()
        self.session.zero_grad()

    def saved(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save({n: getattr(self, n).state_dict() for n in ("model", "optimizer", "schedule", "session")}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, states: Mapping[str, Any]) -> None:
        """In an order that depends on where the run is."""
        names = list(states)
        for name in names[self.drawn % 4 :] + names[: self.drawn % 4]:
            getattr(self, name).load_state_dict(states[name])

    def end(self) -> dict[str, Any]:
        """All that is left of the run."""
        with self.session.full_precision(values_only=True):
            weights = copy.deepcopy(self.model.state_dict())
        left = {"weights": weights, "told": self.told, "scale": self.session.loss_scale()}
        self.session.close()
        closed = copy.deepcopy(self.model.state_dict())
        return {**left, "closed": closed, "optimizer": copy.deepcopy(self.optimizer.state_dict())}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested things differ, in any bit of a tensor that is a number, or in a dtype."""
    if isinstance(one, Tensor):
        equal = one.dtype is other.dtype and torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5))
        return [] if equal else [path]
    if isinstance(one, dict):
        missing = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        return missing + [
            d for key in one.keys() & other.keys() for d in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [path]
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}/{i}")]
    return [] if one == other or (one != one and other != other) else [path]
