"""The demo's report: what was trained, what came out, in one HTML file and one JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..policy import cpu_arithmetic
from ..report import BarChart, Bars, LineChart, Marker, Report, Section, Series, smoothed, to_json
from ..report.files import write_json
from ..zoo import Task
from ._run import Results
from ._tables import Judgement, judge, judgement_table, task_table

SCHEMA = "preamp-demo/2"


def schema() -> dict[str, Any]:
    """The JSON schema of `results.json` (draft 2020-12)."""
    text = files(__package__).joinpath("results.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def results_dict(results: Results) -> dict[str, Any]:
    """Everything that was measured, as `schema()` describes it."""
    plan = results.plan
    content = {
        "schema": SCHEMA,
        "interrupted": results.interrupted,
        "seconds": results.seconds,
        "environment": results.environment,
        "plan": {
            "models": [task.name for task in plan.tasks],
            "levels": list(plan.levels),
            "size": plan.size,
            "quick": plan.quick,
            "seeds": list(plan.seeds),
            "device": str(plan.device),
        },
        "runs": [trial.to_dict() for trial in results.trials],
        "judgements": [j.to_dict() for task in plan.tasks for j in judge(results, task)],
    }
    converted: dict[str, Any] = to_json(content)
    return converted


def build(results: Results) -> Report:
    """The report of what there is, complete or interrupted."""
    judgements = [j for task in results.plan.tasks for j in judge(results, task)]
    sections = [_overview(results, judgements)]
    sections += [_task_section(results, task) for task in results.plan.tasks if _ran(results, task)]
    data = results_dict(results)
    for run in data["runs"]:
        run.pop("step_ms", None)  # kept in results.json; the page shows medians
    line, status = verdict(results, judgements), _status(results, judgements)
    words, paste = _advice(judgements)
    return Report(
        "preamp demo",
        line,
        sections,
        headline=_headline(judgements) if status == "good" else "",
        picture=quality_chart(results, judgements),
        advice=words,
        paste=paste,
        environment=results.environment,
        data=data,
        status=status,
    )


def verdict(results: Results, judgements: Sequence[Judgement]) -> str:
    """The one line to remember."""
    count = len({t.task for t in results.trials if t.complete})
    networks = f"{count} network" + ("" if count == 1 else "s")
    if results.interrupted:
        return f"Not finished: after {results.seconds:.0f} s {networks} have results, the rest is missing."
    if not judgements:
        return f"{networks} trained; nothing to compare, since O0 and a 16-bit level are needed for that."
    below = [j for j in judgements if not j.within]
    seeds = judgements[0].seeds
    if seeds == 1:
        worst = min(judgements, key=lambda j: j.quality - j.low)
        shown = [f"{worst.quality:.3f}", f"{worst.low:.3f}"]
        told = f"the 16-bit level furthest below float32 is {worst.task} {worst.level}: {worst.metric} {shown[0]}"
        said = f"{told} against {shown[1]}" if shown[0] < shown[1] else "in three digits no level is below float32"
        return f"{networks} trained with one seed, too few for a band; {said}."
    band = f"the band of {seeds} float32 seeds"
    if below:
        names = ", ".join(f"{j.task} {j.level}" for j in below)
        return f"{len(judgements) - len(below)} of {len(judgements)} 16-bit results reach {band}; below: {names}."
    return f"All {len(judgements)} 16-bit results on {networks} reach {band}."


def quality_chart(results: Results, judgements: Sequence[Judgement]) -> BarChart | None:
    """Every 16-bit result against the mean of the float32 seeds; float32's own seeds show what chance alone does."""
    if not judgements:
        return None
    tasks = [task for task in results.plan.tasks if any(j.task == task.name for j in judgements)]
    judged = [level for level in results.plan.levels if any(j.level == level for j in judgements)]
    bars, several = [], judgements[0].seeds > 1
    for level in ("O0", *judged):
        columns: list[tuple[float | None, ...]] = []
        for task in tasks:
            full = statistics.fmean(q for t in results.of(task.name, "O0") if (q := t.quality) is not None)
            gaps = [100 * (t.quality - full) for t in results.of(task.name, level) if t.quality is not None]
            mean = round(statistics.fmean(gaps), 6) + 0.0 if gaps else None  # not 1e-16, nor -0
            columns.append((mean, min(gaps, default=None), max(gaps, default=None)))
        means, lows, highs = zip(*columns, strict=True)
        name = "O0, which is float32" if level == "O0" else level
        bars.append(Bars(name, means, lows if several else None, highs if several else None))
    label, note = "points of 100 above O0's mean", "Bars are means; whiskers go from the worst to the best seed."
    tasks_named = [f"{task.name}, {task.metric}" for task in tasks]
    return BarChart("Quality against float32", tasks_named, bars, label, digits=3, note=note if several else "")


def _headline(judgements: Sequence[Judgement]) -> str:
    """The verdict of a demo in which all is well, for those who do not know what a band is."""
    networks, seeds = len({j.task for j in judgements}), judgements[0].seeds
    return (
        f"16 bits train as well as float32: all {len(judgements)} results on {networks} "
        f"network{'s' if networks > 1 else ''} are at least as good as the worst of {seeds} float32 seeds."
    )


def _advice(judgements: Sequence[Judgement]) -> tuple[str, str]:
    """What to do after a demo, in words, and what to paste for it."""
    below = [j for j in judgements if not j.within]
    if below and below[0].seeds > 1:
        return f"Look at the curves of `{below[0].task}` below, then run it with more seeds:", (
            f"preamp demo --model {below[0].task} --seeds 8"
        )
    return "Compare your own training script with float32 in the same way; nothing in it has to change:", (
        "preamp compare train.py"
    )


def write(results: Results, folder: Path) -> tuple[Path, Path, Report]:
    """Write `report.html` and `results.json`, each whole or not at all; returns their paths, and the report."""
    report = build(results)
    page, data = report.write_html(folder / "report.html"), write_json(folder / "results.json", results_dict(results))
    return page, data, report


def _status(results: Results, judgements: Sequence[Judgement]) -> Any:
    if results.interrupted:
        return "warning"
    if not judgements or judgements[0].seeds < 2:
        return "neutral"
    return "good" if all(j.within for j in judgements) else "warning"


def _ran(results: Results, task: Task) -> bool:
    return any(t.task == task.name and t.losses for t in results.trials)


def _overview(results: Results, judgements: Sequence[Judgement]) -> Section:
    plan = results.plan
    text = (
        f"{len(plan.tasks)} networks, levels {', '.join(plan.levels)}, "
        f"seeds for each: {len(plan.seeds)}, size {plan.size}{' (quick)' if plan.quick else ''}, "
        f"{results.seconds:.0f} s in all. "
    )
    if plan.device.type == "cpu":
        text += (
            f"\n\nOn this machine times prove nothing about a GPU. {cpu_arithmetic()} "
            "Peak memory is counted, not sampled: parameters, gradients, masters, optimizer state, and each tensor "
            "that autograd keeps for backward, once. The count is the same on every machine."
        )
    return Section("Overview", text, (judgement_table(judgements),) if judgements else ())


def _task_section(results: Results, task: Task) -> Section:
    made = (task_table, loss_chart, scale_chart)
    items = [item for make in made if (item := make(results, task)) is not None]
    return Section(task.title, task.data, items, anchor=task.name)


def loss_chart(results: Results, task: Task) -> LineChart:
    """Training loss over steps, smoothed, with a band over the seeds."""
    series = []
    for level in results.plan.levels:
        trials = [t for t in results.trials if (t.task, t.level) == (task.name, level) and t.losses]
        if trials:
            series.append(_band(level, [smoothed(t.losses) for t in trials]))
    note = "Exponential average over ten steps; bands span the seeds." if len(results.plan.seeds) > 1 else ""
    return LineChart(f"{task.title}: training loss", "step", "loss", series, note=note, against="O0")


def scale_chart(results: Results, task: Task) -> LineChart | None:
    """The loss scale over steps, for the levels at which it changes; skips as marks."""
    series, markers = [], []
    for trial in results.trials:
        if trial.task == task.name and trial.seed == 0 and len(set(trial.scales)) > 1:
            series.append(Series(trial.level, range(len(trial.scales)), trial.scales, steps=True))
            markers += [Marker(step, trial.scales[step], "skipped") for step in trial.skipped]
    if not series:
        return None
    return LineChart(f"{task.title}: loss scale", "step", "scale", series, y_log2=True, markers=markers)


def _band(name: str, curves: Sequence[Sequence[float]]) -> Series:
    """The mean of curves as far as the shortest goes, with a band over several."""
    columns = list(zip(*curves, strict=False))
    band = [(min(column), max(column)) for column in columns]
    lows, highs = ([low for low, _ in band], [high for _, high in band]) if len(curves) > 1 else (None, None)
    return Series(name, range(len(columns)), [statistics.fmean(column) for column in columns], lows, highs)
