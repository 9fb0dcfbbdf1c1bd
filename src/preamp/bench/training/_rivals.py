"""Optimizers of other libraries that do what some of preamp's do, where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter


@dataclass(frozen=True, kw_only=True)
class Rival:
    """An optimizer of another library. `masters`: whether it keeps float32 masters of 16-bit parameters itself."""

    name: str
    package: str
    """The distribution it comes with; importing a name proves nothing where preamp stands in for Apex."""
    module: str
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    masters: bool = False

    @property
    def installed(self) -> bool:
        """Whether its distribution is there."""
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    def make(self, params: Sequence[Parameter], lr: float) -> torch.optim.Optimizer:
        """The optimizer over `params`."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        made: torch.optim.Optimizer = kind(params, lr=lr, **self.arguments)
        return made


RIVALS = (
    Rival(
        name="apex FusedAdam, masters", package="apex", module="apex.optimizers", kind="FusedAdam", masters=True,
        arguments={"adam_w_mode": False, "capturable": True, "master_weights": True},
    ),
    Rival(name="bitsandbytes Adam8bit", package="bitsandbytes", module="bitsandbytes.optim", kind="Adam8bit"),
    Rival(name="torchao Adam8bit", package="torchao", module="torchao.optim", kind="Adam8bit"),
)  # fmt: skip


def installed() -> list[Rival]:
    """Those that this machine has."""
    return [rival for rival in RIVALS if rival.installed]
