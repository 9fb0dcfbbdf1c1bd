"""PA112: a forward pass that is done again for the backward one, in another precision than the first time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..formats import name_of
from ..report import Finding
from ._names import Names
from ._stack import Line, users_line

_State = tuple[torch.dtype, ...]


class Recomputed:
    """Follows the autocast region in which each module runs, forward and when it is recomputed."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._first: dict[nn.Module, _State] = {}
        self._differ: list[tuple[str, _State, _State, Line]] = []
        self._hook: Any = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def close(self) -> None:
        """Let go of torch's global hook."""
        self._hook.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        now = _region()
        if torch._C._current_autograd_node() is None:
            self._first.setdefault(module, now)
            return
        before, path = self._first.get(module), self._names.get(module)
        if before is None or before == now or path is None:
            return
        if not any(path == outer or path.startswith(f"{outer}.") for outer, *_ in self._differ):
            self._differ.append((path, before, now, users_line()))

    def findings(self) -> Iterator[Finding]:
        """One for each outermost module that was recomputed otherwise."""
        for path, before, now, (file, line) in self._differ:
            yield Finding(
                "PA112", "warning",
                f"the forward pass of this module ran in {_spelt(before)} and is recomputed for the backward pass in "
                f"{_spelt(now)}: its gradients belong to other numbers than its output",
                module=path, direction="backward", file=file, line=line,
                evidence={"forward": _spelt(before), "recomputed": _spelt(now)},
                fix="torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # keeps the autocast region\n"
                "# or decorate the autograd.Function's methods: torch.amp.custom_fwd and torch.amp.custom_bwd",
            )  # fmt: skip


def _region() -> _State:
    kinds = ("cpu", "cuda")
    return tuple(torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind))


def _spelt(state: _State) -> str:
    return f"an autocast region for {' and '.join(map(name_of, state))}" if state else "float32, outside any region"
