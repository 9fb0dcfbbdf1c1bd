"""What a demo runs: which networks, at which levels, how long."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import PolicyError, PreampError
from ..machine import device_named
from ..policy import LEVELS
from ..zoo import TASKS, Recipe, Task, task_named


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the demo was asked for, resolved."""

    tasks: tuple[Task, ...]
    levels: tuple[str, ...]
    size: str
    quick: bool
    seeds: tuple[int, ...]
    device: torch.device

    def recipe(self, task: Task) -> Recipe:
        """How a task is trained."""
        return task.recipe(self.size, quick=self.quick)

    def steps(self, task: Task) -> int:
        """Of all runs of a network."""
        return len(self.levels) * len(self.seeds) * self.recipe(task).steps


def make_plan(
    models: list[str] | None, levels: str | None, size: str, quick: bool, seeds: int | None, device: str | None
) -> Plan:
    """Resolve what was asked for; `PreampError` names what is not there."""
    tasks = tuple(dict.fromkeys(task_named(name, size) for name in models or TASKS))
    where = device_named(device)
    count = (1 if quick else 3) if seeds is None else seeds
    if count < 1:
        raise PreampError(f"--seeds {count}: at least one seed is needed")
    return Plan(
        tasks=tasks, levels=_levels(levels, where), size=size, quick=quick, seeds=tuple(range(count)), device=where
    )


def _levels(text: str | None, device: torch.device) -> tuple[str, ...]:
    if text is not None:
        asked = [part.strip() for part in text.split(",") if part.strip()]
        known = {name.lower(): level.name for level in LEVELS for name in (level.name, level.alias)}
        unknown = [name for name in asked if name.lower() not in known]
        if unknown or not asked:
            raise PolicyError(
                f"--levels {text!r}: there is no level {unknown[0] if unknown else text!r}; "
                f"write some of {','.join(level.name for level in LEVELS)}"
            )
        return tuple(dict.fromkeys(known[name.lower()] for name in asked))
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return ("O0", "O1", "O2")
    return ("O0", "O1", "O2", "O4", "O5")
