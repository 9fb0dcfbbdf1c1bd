"""Runs a plan, with progress bars, on several processes if asked, and survives Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..machine import environment
from ..sharding import rank, ranks
from ..zoo import Task
from ._plan import Plan
from ._range_test import RangeTest, range_test
from ._trial import Trial, run_trial

HISTOGRAM_SCALE = 2.0**16
"""The scale at which the figure of gradients shows what scaling saves: where dynamic scaling starts."""


@dataclass(kw_only=True)
class Results:
    """What the demo has so far; valid at any time."""

    plan: Plan
    environment: dict[str, Any]
    trials: list[Trial] = field(default_factory=list)
    range_test: RangeTest | None = None
    interrupted: bool = False
    seconds: float = 0.0

    def of(self, task: str, level: str) -> list[Trial]:
        """The runs of a level that went to the end."""
        return [t for t in self.trials if (t.task, t.level) == (task, level) and t.complete]


def run(plan: Plan, console: Console) -> Results:
    """Train everything in the plan. Ctrl-C ends it early and keeps what there is."""
    results = Results(plan=plan, environment={**environment(plan.device), "processes": ranks()})
    began = time.perf_counter()
    try:
        with Bars(console, sum(map(plan.steps, plan.tasks)) + _sweep_steps(plan)) as bars:
            for task in plan.tasks:
                console.print(f"[bold]{task.title}[/bold]  [dim]{task.data}[/dim]")
                with bars.of(f"{task.name}: preparing data"):
                    # the first batch loads and prepares the data, which is kept out of the first run's time
                    next(iter(task.batches(plan.size, seed=0, steps=1, batch_size=plan.recipe(task).batch_size)))
                for level in plan.levels:
                    for seed in plan.seeds:
                        _train(results, bars, task, level, seed)
            if rank() == 0:
                _sweep(results, bars)
    except KeyboardInterrupt:
        results.interrupted = True
        console.print("[yellow]interrupted: reporting what there is[/yellow]")
    results.seconds = time.perf_counter() - began
    return results


class Bars:
    """A bar of all steps, with the time that is left, and one of the run under way; where no terminal is, nothing."""

    def __init__(self, console: Console, steps: int) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        )  # fmt: skip
        # networks take different times: judged by the last minutes
        self.progress = Progress(*columns, console=console, transient=True, speed_estimate_period=180)
        self._all = self.progress.add_task(f"{'all':24}", total=steps, shown="left")
        self._done = 0

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


def _sweep_steps(plan: Plan) -> int:
    """Steps of the range test; 0 where no 16-bit level is trained."""
    return (60 if plan.quick else 120) if any(level != "O0" for level in plan.levels) else 0


def _sweep(results: Results, bars: Bars) -> None:
    """A range test of the last network (SE-ResNeXt, unless others were asked for) at the first 16-bit level."""
    plan = results.plan
    steps = _sweep_steps(plan)
    if not steps:
        return
    low = next(level for level in plan.levels if level != "O0")
    with bars.of(f"{plan.tasks[-1].name} {low} learning rates", steps) as at:
        results.range_test = range_test(
            plan.tasks[-1], low, size=plan.size, device=plan.device, steps=steps, on_step=lambda step: at(step + 1, ""),
        )  # fmt: skip


def _train(results: Results, bars: Bars, task: Task, level: str, seed: int) -> None:
    plan = results.plan
    recipe = plan.recipe(task)
    with_histogram = level == "O0" and seed == 0
    with bars.of(f"{task.name} {level} seed {seed}", recipe.steps) as at:
        trial = run_trial(
            task, level, size=plan.size, seed=seed, device=plan.device, recipe=recipe,
            on_step=lambda trial: at(len(trial.losses), f"loss {trial.losses[-1]:.3f}"),
            histogram_scale=HISTOGRAM_SCALE if with_histogram else None, into=results.trials,
        )  # fmt: skip
    skips = f", skipped {len(trial.skipped)}" if trial.skipped else ""
    bars.progress.console.print(
        f"  {level} seed {seed}: loss {trial.final_loss:.4f}, {task.metric} {trial.quality:.3f}, "
        f"{trial.ms_per_step:.1f} ms/step{skips}"
    )


def torchrun(processes: int, arguments: Sequence[str]) -> int:
    """`preamp ARGUMENTS` as so many processes of one group; the status of the first that failed, 0 if none did."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # each process would take all cores else, and torchrun would give it one
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    # without --nproc and its number, which torchrun would take for an option of its own
    pairs = zip(["", *arguments], arguments, strict=False)
    kept = [own for before, own in pairs if not own.startswith("--nproc") and before != "--nproc"]
    return subprocess.run([*line, "-m", "preamp", *kept], env=environment, check=False).returncode
