"""What a demo runs: which levels make sense on a device, whole or as a slice."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..bench import device_named
from ..errors import PolicyError, PreampError
from ..policy import LEVELS, parse_policy
from ..zoo import TASKS, Recipe, Task, task_named

SLICE_BATCH = 4
SLICE_STEPS, SLICE_SECONDS = {False: 40, True: 12}, {False: 6.0, True: 1.5}
"""Without and with --quick: a float16 level on a CPU gets so many steps of so many samples, for so many seconds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the demo was asked for, resolved."""

    tasks: tuple[Task, ...]
    whole: tuple[str, ...]
    """Levels trained to the end, for every seed."""
    sliced: tuple[str, ...]
    """Levels that get a few steps only."""
    size: str
    quick: bool
    seeds: tuple[int, ...]
    device: torch.device

    def recipe(self, task: Task) -> Recipe:
        """How a task is trained to the end."""
        return task.recipe(self.size, quick=self.quick)

    def slice(self, task: Task) -> Recipe:
        """How a sliced level is trained: too short to learn, long enough to see the same losses as float32."""
        return replace(self.recipe(task), steps=SLICE_STEPS[self.quick], batch_size=SLICE_BATCH)

    def steps(self, task: Task) -> int:
        """Of all runs of a network."""
        sliced = 1 + len(self.sliced) if self.sliced else 0  # float32 is sliced with them
        return len(self.whole) * len(self.seeds) * self.recipe(task).steps + sliced * self.slice(task).steps

    def check_shared(self, processes: int) -> None:
        """`PreampError` unless so many processes can share every batch equally."""
        recipes = [recipe(task) for task in self.tasks for recipe in (self.recipe, self.slice)]
        odd = next((recipe.batch_size for recipe in recipes if recipe.batch_size % processes), None)
        if odd is not None:
            raise PreampError(f"--nproc {processes}: a batch of {odd} samples cannot be shared equally; take 2 or 4")


def make_plan(
    models: list[str] | None, levels: str | None, size: str, quick: bool, seeds: int | None, device: str | None
) -> Plan:
    """Resolve what was asked for; `PreampError` names what is not there."""
    tasks = tuple(dict.fromkeys(task_named(name, size) for name in models or TASKS))
    where = device_named(device)
    count = (1 if quick else 3) if seeds is None else seeds
    if count < 1:
        raise PreampError(f"--seeds {count}: at least one seed is needed")
    asked = _levels(levels, where)
    slow = where.type == "cpu"
    sliced = tuple(level for level in asked if slow and parse_policy(level).compute is torch.float16)
    return Plan(
        tasks=tasks,
        whole=tuple(level for level in asked if level not in sliced),
        sliced=sliced,
        size=size,
        quick=quick,
        seeds=tuple(range(count)),
        device=where,
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
        return ("O0", "O1", "O2", "O3")
    if device.type == "cpu":
        return ("O0", "O4", "O5", "O1", "O2", "O3")
    return tuple(level.name for level in LEVELS)
