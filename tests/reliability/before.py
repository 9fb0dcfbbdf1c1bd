"""Trainings whose files are in the repository, and go on from them.

`python -m tests.reliability.before FOLDER` trains each a few steps, saves it, trains on, and writes file and further
losses to the folder. `test_written_before.py` loads the files that are in the repository.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp import optim
from preamp.compat.apex import amp
from preamp.compat.apex.fp16_utils import FP16_Optimizer

BEFORE, AFTER = 3, 4
"""Steps before and after the file is written."""

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, tuple[str | None, Make]] = {
    "o1_torch_adamw": ("O1", lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "o2_torch_adam": ("O2", lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True)),
    "o2_torch_sgd": ("O2", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
    "o3_adam": ("O3", lambda p: optim.Adam(p, lr=1e-3, eps=1e-4, master=None)),
    "o4_adamw": ("O4", lambda p: optim.AdamW(p, lr=1e-2)),
    "o4_adam_8bit": ("O4", lambda p: optim.Adam(p, lr=1e-2, states="8bit")),
    "o5_adamw": ("O5", lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True)),
    "o5_adamw_split": ("O5", lambda p: optim.AdamW(p, lr=1e-2, master="split")),
    "o5_adam_split_8bit": ("O5", lambda p: optim.Adam(p, lr=1e-2, master="split", states="8bit")),
    "o5_adam_split24_8bit": ("O5", lambda p: optim.Adam(p, lr=1e-2, master="split24", states="8bit")),
    "o5_sgd": ("O5", lambda p: optim.SGD(p, lr=1e-2, momentum=0.9)),
    "o5_adagrad": ("O5", lambda p: optim.Adagrad(p, lr=1e-2)),
    "o5_lamb": ("O5", lambda p: optim.LAMB(p, lr=1e-2)),
    "o5_novograd": ("O5", lambda p: optim.NovoGrad(p, lr=1e-2)),
    "alone_adamw": (None, lambda p: optim.AdamW(p, lr=1e-2)),
    "alone_adamw_split": (None, lambda p: optim.AdamW(p, lr=1e-2, master="split")),
    "alone_adam_stochastic": (None, lambda p: optim.Adam(p, lr=1e-2, master=None, rounding="stochastic")),
}


def network(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 16, generator=made), torch.randint(4, (8,), generator=made)


class WithSession:
    """A session and its optimizer, saved as one checkpoint; or an optimizer alone, of 16-bit weights (`level` None)."""

    def __init__(self, level: str | None, make: Make, width: int) -> None:
        self.model = network(width) if level else network(width).to(torch.bfloat16)
        self.optimizer = make(self.model.parameters())
        self.session = preamp.prepare(self.model, self.optimizer, level=level) if level else None

    def step(self, number: int) -> float:
        x, y = batch(number)
        if self.session is None:
            loss = nn.functional.cross_entropy(self.model(x.bfloat16()).float(), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item()
        with self.session.autocast():
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.session.backward(loss)
        self.session.clip_grad_norm_(1.0)
        self.session.step()
        self.session.zero_grad()
        return loss.item()

    def parts(self) -> dict[str, Any]:
        session = {} if self.session is None else {"session": self.session}
        return {"model": self.model, "optimizer": self.optimizer, **session}

    def save(self, path: Path) -> None:
        preamp.checkpoint.save(path, **self.parts(), epoch=7)

    def load(self, path: Path) -> None:
        assert preamp.checkpoint.load(path, **self.parts())["epoch"] == 7

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


class InStates:
    """Saved as the states of its parts; nothing is held."""

    parts: dict[str, Any]

    def save(self, path: Path) -> None:
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False)  # Apex's FP16_Optimizer saves its scaler as an object
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])

    def close(self) -> None:
        """Nothing to do."""


class WithApex(InStates):
    """`amp.initialize`, as its README saves it."""

    def __init__(self, level: str) -> None:
        model = network()
        self.model, self.optimizer = amp.initialize(
            model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), opt_level=level, verbosity=0
        )
        self.parts = {"model": self.model, "optimizer": self.optimizer, "amp": amp}

    def step(self, number: int) -> float:
        x, y = batch(number)
        loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.optimizer.zero_grad()
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss.item()

    def close(self) -> None:
        amp.close()


class WithFP16Optimizer(InStates):
    """Apex's FP16_Optimizer around one of torch's, on a model in float16."""

    def __init__(self) -> None:
        self.model = network().half()
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int) -> float:
        x, y = batch(number)
        loss = nn.functional.cross_entropy(self.model(x.half()).float(), y)
        self.optimizer.zero_grad()
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss.item()


class WithScaler(InStates):
    """`preamp.GradScaler` beside an optimizer, and the optimizer saved as a whole object."""

    def __init__(self) -> None:
        self.model = network()
        self.optimizer: Any = optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = preamp.GradScaler("cpu", init_scale=64.0, growth_interval=3, schedule="hysteresis")

    def step(self, number: int) -> float:
        x, y = batch(number)
        with preamp.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, path: Path) -> None:
        torch.save({"both": (self.model, self.optimizer), "scaler": self.scaler.state_dict()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=False)
        self.model, self.optimizer = saved["both"]
        self.scaler.load_state_dict(saved["scaler"])


TRAININGS: dict[str, Callable[[], Any]] = {
    **{
        name: partial(WithSession, level, make, 64 if "8bit" in name else 16)  # a parameter of 4096 elements has codes
        for name, (level, make) in OPTIMIZERS.items()
    },
    "apex_o1": partial(WithApex, "O1"),
    "apex_o2": partial(WithApex, "O2"),
    "apex_fp16_optimizer": WithFP16Optimizer,
    "grad_scaler": WithScaler,
}


def continued(training: Any) -> list[float]:
    """The losses of the steps after the file was written."""
    return [training.step(BEFORE + number) for number in range(AFTER)]


def main(folder: Path) -> None:
    losses = {}
    for name, make in TRAININGS.items():
        training = make()
        for number in range(BEFORE):
            training.step(number)
        training.save(folder / f"{name}.pt")
        losses[name] = continued(training)
        training.close()
    (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
