"""The demo's figures as tables and judgements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..report import Column, Table
from ..zoo import Task
from ._run import Results
from ._trial import Trial

MIB = 2**20


@dataclass(frozen=True)
class Judgement:
    """Quality of a level beside the band of the float32 seeds."""

    task: str
    level: str
    metric: str
    quality: float
    low: float
    high: float
    seeds: int

    @property
    def within(self) -> bool:
        """Whether the mean quality is not below the worst float32 seed."""
        return self.quality >= self.low

    @property
    def verdict(self) -> str:
        """In words; one seed makes no band."""
        if self.seeds == 1:
            return "one seed"
        if self.quality < self.low:
            return "below the band"
        return "within the band" if self.quality <= self.high else "above the band"

    def to_dict(self) -> dict[str, Any]:
        """Every field and the verdict."""
        return {**asdict(self), "within": self.within, "verdict": self.verdict}


def judge(results: Results, task: Task) -> list[Judgement]:
    """Every level but O0 against the band of O0's seeds; empty when O0 did not run to its end."""
    band = [t.quality for t in results.of(task.name, "O0") if t.quality is not None]
    if not band:
        return []
    found = []
    for level in results.plan.levels:
        qualities = [t.quality for t in results.of(task.name, level) if t.quality is not None]
        if level != "O0" and qualities:
            quality = statistics.fmean(qualities)
            low, high, seeds = min(band), max(band), len(band)
            found.append(Judgement(task.name, level, task.metric, quality, low, high, seeds))
    return found


def task_table(results: Results, task: Task) -> Table:
    """One row a level: time, memory, loss, quality, skips, scale, dtype."""
    rows = []
    reference = _median_ms(results.of(task.name, "O0"))
    for level in results.plan.levels:
        trials = results.of(task.name, level)
        if not trials:
            continue
        ms = _median_ms(trials)
        qualities = [t.quality for t in trials if t.quality is not None]
        rows.append(
            (
                level,
                ms,
                reference / ms if reference and ms else None,
                max(t.peak_bytes for t in trials) / MIB,
                statistics.fmean(t.final_loss for t in trials if t.final_loss is not None),
                statistics.fmean(qualities) if qualities else None,
                sum(len(t.skipped) for t in trials),
                trials[-1].scales[-1],
                observed(trials[0]),
            )
        )
    return Table(
        f"{task.title}, {results.plan.size}",
        (
            "level", Column("time", "ms/step", 1), Column("against O0", "x", 2), Column("memory", "MiB", 1),
            Column("final loss", digits=4), Column(task.metric, digits=4), Column("skips", digits=0), "scale",
            "dtypes seen",
        ),
        rows,
        notes=(_recipe_note(results, task),),
    )  # fmt: skip


def judgement_table(judgements: Sequence[Judgement]) -> Table:
    """Quality of the 16-bit levels beside the float32 band."""
    seeds = judgements[0].seeds if judgements else 0
    return Table(
        f"Quality against float32 ({seeds} seed{'s' if seeds != 1 else ''})",
        ("network", "metric", "level", Column("mean quality", digits=4),
         Column("fp32, worst", digits=4), Column("fp32, best", digits=4), "verdict"),
        [(j.task, j.metric, j.level, j.quality, j.low, j.high, j.verdict) for j in judgements],
    )  # fmt: skip


def observed(trial: Trial) -> str:
    """The dtypes that layers with parameters gave in forward, commonest first."""
    total = sum(trial.dtypes.values())
    if len(trial.dtypes) == 1:
        return next(iter(trial.dtypes))
    return ", ".join(f"{name} {count}/{total}" for name, count in trial.dtypes.items())


def _median_ms(trials: Sequence[Trial]) -> float | None:
    times = [t.ms_per_step for t in trials if t.ms_per_step is not None]
    return statistics.median(times) if times else None


def _recipe_note(results: Results, task: Task) -> str:
    recipe = results.plan.recipe(task)
    parameters = next((t.parameters for t in results.trials if t.task == task.name), 0)
    return (
        f"{parameters:,} parameters; {recipe.steps} steps of {recipe.batch_size}, {recipe.optimizer}, OneCycle to "
        f"{recipe.max_lr:g}, clipped at {recipe.clip:g}; times are medians without the first three steps"
    )
