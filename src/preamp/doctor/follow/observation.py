"""The operators of one step of a running script, in the dtypes in which they really run, and what is found in them.

Nothing is changed and nothing is run twice. What can only be told from numbers is told from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from ...report import Finding
from ...tree import tensors
from ..findings import kinds_of
from ..findings.events import Recomputed
from ..findings.pa201 import PA201
from ..names import Names
from ..operators import Observation, Observer, Products, Vanished
from ..places import Place, Places, key_of, users_line
from .audit import Outputs
from .precision import regions_entered
from .run import Run

_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "tanh"})
"""Operators that mean a size: of a gradient that is too large by a factor they make another one."""


class StepObservation(Observation):
    """Shows forward operators to all observers of findings; notes what the script does with weights and gradients."""

    def __init__(self, run: Run, keeps_casts: Callable[[], bool], stop: CodeType | None = None) -> None:
        """`stop`: code of the function whose callers are not looked at, of a step that is done again."""
        names = run.names
        self._observers: list[Any] = [kind() for kind in kinds_of(Observer)]
        self.products, self._vanished, self.outputs = Products(), Vanished(), Outputs()
        super().__init__(
            Places(names.get, names.owners, stop or Places.close.__code__),
            dict(names.items()),
            [*self._observers, self._vanished, self.products, self.outputs],
            run.clock,
        )
        self.modules = dict(names.items())
        self._keeps_casts, self._weights = keeps_casts, {id(p): p for p in names.parameters()}
        self.gradients: frozenset[int] = frozenset()
        """Storages of gradients that are still scaled."""
        self.reads: list[Place] = []
        """Where the script computed with them."""
        self.backward_scale = 1.0
        """On the loss that goes back."""
        self.bounded: list[tuple[Place, str]] = []
        """Where a hook of the script's bounds the gradient of a parameter, and by which operator."""
        self.writes: list[tuple[Place, Tensor]] = []
        """Where a weight was changed in place in the forward pass, while casts of it are kept."""

    def _in_forward(self, place: Place, args: Any, kwargs: Any, written: Sequence[Tensor]) -> None:
        if self._keeps_casts():
            changed = [t if t._base is None else t._base for t in written]
            self.writes += [(place, t) for t in changed if id(t) in self._weights]
        if self.gradients and any(key_of(t) in self.gradients for t in tensors((args, kwargs))):
            self.reads.append(place)

    def _in_backward(self, func: Any, place: Place) -> None:
        """An operator of the script's own in the backward pass. Autograd functions are left to mean what they do."""
        if self.backward_scale == 1 or place.own is None:
            return
        base = func._schema.name.partition("::")[2].rstrip("_")
        node = torch._C._current_autograd_node()
        if base in _BOUNDS and node is not None and node.name() == "torch::autograd::AccumulateGrad":
            self.bounded.append((place, base))

    def findings(self) -> list[Finding]:
        """What the observers found, once nothing more comes."""
        for observer in self._observers:
            observer.end()
        found = [finding for observer in self._observers for finding in observer.findings]
        return [*found, *(PA201.hidden(made, hidden_by) for made, hidden_by in self._vanished.found)]


class Recomputation:
    """Follows the autocast region in which each module runs, forward and when it is recomputed."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._first: dict[nn.Module, tuple[torch.dtype, ...]] = {}
        self._differ: list[Recomputed] = []
        self._hook: Any = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def close(self) -> Iterator[Recomputed]:
        """Let go of torch's global hook; gives the outermost modules that were recomputed otherwise."""
        self._hook.remove()
        return iter(self._differ)

    def _enter(self, module: nn.Module, _: Any) -> None:
        now = tuple(torch.get_autocast_dtype(kind) for kind in regions_entered())
        if torch._C._current_autograd_node() is None:
            self._first.setdefault(module, now)
            return
        before, path = self._first.get(module), self._names.get(module)
        if before is None or before == now or path is None:
            return
        if not any(path == outer.module or path.startswith(f"{outer.module}.") for outer in self._differ):
            self._differ.append(Recomputed(path, before, now, users_line()))
