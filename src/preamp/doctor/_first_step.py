"""The first step of a run, kept in a file: what modules gave, and the weights' gradients; and how two runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..tree import tensors
from ._names import Names

GRADIENTS = 1 << 24
"""Values of a parameter's gradient that are kept; of a larger one, evenly spread ones."""
OUTPUTS = 1 << 16
"""The same of what a module gave."""


class FirstStep:
    """Keeps what each module gave at its first call, and with `write` the gradients too."""

    def __init__(self, path: Path, names: Names) -> None:
        self._path, self._names = path, names
        self._outputs: dict[str, Tensor] = {}
        self._hook: Any = nn.modules.module.register_module_forward_hook(self._left)

    def _left(self, module: nn.Module, args: Any, out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        path = self._names.get(module)
        given = next((t for t in tensors(out) if t.is_floating_point() and t.layout is torch.strided), None)
        if path is not None and path not in self._outputs and given is not None:
            self._outputs[path] = _kept(given, OUTPUTS)

    def write(self, scale: float) -> None:
        """Write it, with the true gradients of all parameters as float32, by name."""
        self._hook.remove()
        self._names.look(())
        gradients: dict[str, Tensor] = {}
        single = len(self._names.models) == 1
        for name, model in self._names.models.items():
            for own, parameter in model.named_parameters():
                grad = parameter.grad
                if grad is not None and grad.layout is torch.strided:
                    gradients[own if single else f"{name}:{own}"] = _kept(grad, GRADIENTS) / scale
        torch.save({"outputs": self._outputs, "gradients": gradients}, self._path)


def _kept(tensor: Tensor, limit: int) -> Tensor:
    with torch.no_grad(), _disable_current_modes():  # nobody else is to see these operators
        flat = tensor.detach().flatten()
        return flat[:: max(-(-flat.numel() // limit), 1)].float().cpu().clone()


@dataclass(frozen=True, slots=True)
class Error:
    """How far something of the mixed run is from the same in full precision."""

    name: str
    relative: float
    """||mixed - full|| / ||full||, L2; infinite where full is zero or mixed is not finite."""
    cosine: float
    """Of the angle between them; 0 where either is zero or not finite."""
    norm: float
    """||full||."""
    lost: float
    """Share of the values that are not zero in full precision and zero in the mixed run."""


@dataclass(frozen=True, slots=True)
class FirstErrors:
    """Errors of one first step: what modules gave, in the order in which they gave it, and gradients by parameter."""

    outputs: tuple[Error, ...] = ()
    gradients: tuple[Error, ...] = ()

    @classmethod
    def between(cls, mixed: Path, full: Path) -> FirstErrors:
        """Of what both files have with the same number of values; empty where a file is missing."""
        if not (mixed.exists() and full.exists()):
            return cls()
        low, high = torch.load(mixed, weights_only=True), torch.load(full, weights_only=True)
        return cls(*(tuple(_errors(low[part], high[part])) for part in ("outputs", "gradients")))

    @property
    def culprit(self) -> Error | None:
        """The first module whose output is another one, while all before it were only rounded; None without any."""
        return next((e for e in self.outputs if e.relative > WRONG), None)


WRONG = 0.1
"""A relative error that rounding to 16 bits, 0.4 % in bfloat16, does not explain."""


def _errors(low: dict[str, Tensor], high: dict[str, Tensor]) -> Iterator[Error]:
    for name, exact in high.items():
        if name not in low or low[name].shape != exact.shape:
            continue
        a, b = low[name].double(), exact.double()
        norm, difference = float(b.norm()), float((a - b).norm())
        relative = difference / norm if norm and difference == difference else float("inf")
        both = float(a.norm()) * norm
        cosine = float(a @ b) / both if 0 < both < float("inf") else 0.0
        there = b != 0
        lost = float(((a == 0) & there).sum()) / max(int(there.sum()), 1)
        yield Error(name, 0.0 if difference == 0 else relative, cosine, norm, lost)
