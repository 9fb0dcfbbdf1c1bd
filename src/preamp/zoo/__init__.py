"""Four real networks on real data that comes with installed packages: what the demo trains.

>>> task = TASKS["flights"]
>>> recipe = task.recipe("ci")
>>> model = task.build("ci", seed=0)
>>> batches = task.batches("ci", seed=0, steps=recipe.steps, batch_size=recipe.batch_size)

The data packages are the extra `demo`; they are looked for when a task's data are first used, not on import.
"""

from __future__ import annotations

from preamp.errors import PreampError
from preamp.zoo.bert import BertTask
from preamp.zoo.flights import FlightsTask
from preamp.zoo.seresnext import SEResNeXtTask
from preamp.zoo.task import Batch, Recipe, Task
from preamp.zoo.unet import UNetTask

TASKS: dict[str, Task] = {task.name: task for task in (FlightsTask(), UNetTask(), BertTask(), SEResNeXtTask())}
"""The tasks by name, in the order in which the demo shows them."""


def task_named(name: str, size: str) -> Task:
    """A task that has a size; `PreampError` lists what there is."""
    if name not in TASKS:
        raise PreampError(f"there is no model {name!r}; the models are {', '.join(TASKS)}")
    task = TASKS[name]
    if size not in task.sizes:
        raise PreampError(f"there is no size {size!r}; the sizes are {', '.join(task.sizes)}")
    return task


__all__ = ["TASKS", "Batch", "Recipe", "Task", "task_named"]
