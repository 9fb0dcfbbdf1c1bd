"""Runs a plan, with progress bars, and survives Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..machine import environment
from ..report.values import format_left
from ..zoo import Task
from ._plan import Plan
from ._trial import Trial, run_trial


@dataclass(kw_only=True)
class Results:
    """What the demo has so far; valid at any time."""

    plan: Plan
    environment: dict[str, Any]
    trials: list[Trial] = field(default_factory=list)
    interrupted: bool = True
    """Whether the plan was not carried out to its end; so it is until then."""
    seconds: float = 0.0

    def of(self, task: str, level: str) -> list[Trial]:
        """The runs of a level that went to the end."""
        return [t for t in self.trials if (t.task, t.level) == (task, level) and t.complete]


def run(plan: Plan, console: Console, on_trial: Callable[[Results], object] = lambda results: None) -> Results:
    """Train everything in the plan; `on_trial` is told after each run. Ctrl-C ends it early and keeps what there is."""
    results = Results(plan=plan, environment=environment(plan.device))
    began = time.perf_counter()
    try:
        with Bars(console, sum(map(plan.steps, plan.tasks))) as bars:
            for task in plan.tasks:
                console.print(f"[bold]{task.title}[/bold]  [dim]{task.data}[/dim]")
                with bars.of(f"{task.name}: preparing data"):
                    # the first batch loads and prepares the data, which is kept out of the first run's time
                    next(iter(task.batches(plan.size, seed=0, steps=1, batch_size=plan.recipe(task).batch_size)))
                for level in plan.levels:
                    for seed in plan.seeds:
                        _train(results, bars, task, level, seed)
                        results.seconds = time.perf_counter() - began
                        on_trial(results)
        results.interrupted = False
    except KeyboardInterrupt:
        results.seconds = time.perf_counter() - began
        console.print("[yellow]interrupted: reporting what there is[/yellow]")
    return results


class Bars:
    """A bar of all steps, with the time that is left, and one of the run under way; shown on a terminal."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )  # fmt: skip
        # networks take different times: judged by the last minutes
        self.progress = Progress(*columns, console=console, transient=True, speed_estimate_period=180)
        self._all = self.progress.add_task(f"{'all':24}", total=steps, shown="left")
        self._done = 0

    @property
    def left(self) -> str:
        """The time that is left, in words, for where no bar is; "" where it is not known."""
        seconds = self.progress.tasks[0].time_remaining
        return f"; {format_left(seconds)}" if seconds and not self.progress.console.is_terminal else ""

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    @contextmanager
    def of(self, name: str, steps: int | None = None) -> Iterator[Callable[[int, str], None]]:
        """Inside, a bar of a run, which is told how many steps were made, and what to show beside it."""
        shown = self.progress.add_task(f"{name:24}", total=steps, shown="")

        def at(step: int, text: str = "") -> None:
            self.progress.update(shown, completed=step, shown=text)
            self.progress.update(self._all, completed=self._done + step)

        try:
            yield at
        finally:
            self.progress.remove_task(shown)
            self._done += steps or 0  # also of a run that ended before
            self.progress.update(self._all, completed=self._done)


def _train(results: Results, bars: Bars, task: Task, level: str, seed: int) -> None:
    plan = results.plan
    recipe = plan.recipe(task)
    with bars.of(f"{task.name} {level} seed {seed}", recipe.steps) as at:
        trial = run_trial(
            task, level, size=plan.size, seed=seed, device=plan.device, recipe=recipe,
            on_step=lambda trial: at(len(trial.losses), f"loss {trial.losses[-1]:.3f}"),
            into=results.trials,
        )  # fmt: skip
    skips = f", skipped {len(trial.skipped)}" if trial.skipped else ""
    bars.progress.console.print(
        f"  {level} seed {seed}: loss {trial.final_loss:.4f}, {task.metric} {trial.quality:.3f}, "
        f"{trial.ms_per_step:.1f} ms/step{skips}{bars.left}"
    )
