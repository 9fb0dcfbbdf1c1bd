"""Small training runs that the reliability tests disturb, and what two of them have to agree in."""

from __future__ import annotations

import copy
import hashlib
import random
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import preamp

from ..session.toys import loss_of, mlp

OPTIMIZERS: dict[str, Any] = {
    "torch": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4),
    "preamp": lambda p: preamp.optim.AdamW(p, 1e-2, eps=1e-4),
}
LEVELS = ("O1", "O2", "O4", "O5")


class Run:
    """A model, its optimizer and its session; `step` takes one step on the batch of that number."""

    open: ClassVar[list[Run]] = []

    def __init__(self, level: str = "O2", kind: str = "torch", seed: int = 0, **options: Any) -> None:
        self.model: nn.Module = mlp(seed)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.session = preamp.prepare(self.model, self.optimizer, level=level, **options)
        self.open.append(self)

    def step(self, index: int, factor: float = 1.0) -> preamp.StepReport:
        with self.session.autocast():
            loss = loss_of(self.model, index)
        self.session.backward(loss * factor)
        report = self.session.step()
        self.session.zero_grad()
        return report

    def steps(self, *indices: int) -> None:
        for index in indices:
            self.step(index)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "session": self.session}

    def state(self) -> dict[str, Any]:
        """A copy of all state there is."""
        return {name: copy.deepcopy(thing.state_dict()) for name, thing in self.objects.items()}

    def close(self) -> None:
        self.session.close()

    @classmethod
    def close_all(cls) -> None:
        while cls.open:
            cls.open.pop().close()


def alike(a: Any, b: Any) -> bool:
    """Whether two states are equal bit for bit, in dtypes, structure and numbers too."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (torch.equal(a, b) or a.numpy().tobytes() == b.numpy().tobytes())
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and bool(a == b)


def seeded(name: str) -> random.Random:
    """A source of chance that a test can name in its failure."""
    return random.Random(name)


def sealed(path: Path) -> Path:
    """Seal an archive that torch.save or zipfile has written, as whoever forges a checkpoint would."""
    whole = path.read_bytes()
    seal = b"preamp sha256 " + hashlib.sha256(whole).hexdigest().encode()
    path.write_bytes(whole[:-2] + len(seal).to_bytes(2, "little") + seal)
    return path
