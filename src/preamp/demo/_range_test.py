"""The learning-rate range test on a network of the zoo, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..lr_finder import LrCurve, sweep
from ..report import LineChart, Marker, Series
from ..session import prepare
from ..zoo import Task
from ._trial import make_optimizer


@dataclass(frozen=True)
class RangeTest:
    """A curve, the level it was taken at ("auto" resolved), and its chart."""

    level: str
    curve: LrCurve
    chart: LineChart


def range_test(
    task: Task,
    level: str,
    *,
    size: str,
    device: torch.device,
    steps: int = 100,
    start_lr: float = 1e-6,
    end_lr: float = 10.0,
    batch_size: int | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> RangeTest:
    """Sweep a new model of `task` under `level`, clipping as its recipe does."""
    recipe = task.recipe(size)
    model = task.build(size, seed=0).to(device)
    optimizer = make_optimizer(recipe, model)
    batches = list(task.batches(size, seed=0, steps=steps, batch_size=batch_size or recipe.batch_size))

    def loss_of(batch: Any) -> torch.Tensor:
        inputs, target = batch
        return task.loss(model(*(x.to(device) for x in inputs)), target.to(device))

    with prepare(model, optimizer, level=level) as session:
        curve = sweep(
            session, batches, loss_of, start_lr=start_lr, end_lr=end_lr, steps=steps, clip=recipe.clip, on_step=on_step
        )
        shown = session.policy.level or level
    return RangeTest(shown, curve, lr_chart(curve, f"{task.title}, {shown}"))


def lr_chart(curve: LrCurve, title: str) -> LineChart:
    """Loss against rate, raw and smoothed, the suggestions marked on the smoothed curve."""
    markers = []
    for name, lr in curve.suggestions.items():
        nearest = min(range(len(curve.lrs)), key=lambda i: abs(curve.lrs[i] - lr))
        on_curve = curve.smoothed[nearest] if lr >= curve.lrs[0] else None
        markers.append(Marker(lr, on_curve, f"{name} {lr:.2g}"))
    low, high = min(curve.smoothed), max(curve.smoothed[: max(1, len(curve.smoothed) * 9 // 10)])
    top = high + 0.5 * (high - low)  # the last raw losses may be enormous, and would flatten the curve
    raw = [value if value <= top else None for value in curve.losses]
    smoothed = [value if value <= top else None for value in curve.smoothed]
    return LineChart(
        f"Range test: {title}",
        "learning rate",
        "loss",
        (Series("smoothed", curve.lrs, smoothed), Series("each batch", curve.lrs, raw, dashed=True)),
        x_log=True,
        markers=markers,
        note=f"{curve.skipped} skipped steps are left out.",
    )
