"""Does training arrive where float32 arrives?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._results import failure
from ._contenders import EAGER, PARITY, Contender, Trainer
from ._measure import Clock, Tell, free, quiet
from ._rows import TrainingRow
from ._works import Work

FP32 = next(contender for contender in EAGER if contender.name == "fp32")
TAIL = 20
"""Steps at the end whose mean loss is the final one."""
SETTLED = 50
"""Steps after which a scale should have found its place."""


def parity_row(
    work: Work, device: torch.device, steps: int, clock: Clock, reserve: float = 0.0, tell: Tell = quiet,
    contenders: Sequence[Contender] = PARITY, part: str = "parity",
) -> TrainingRow:  # fmt: skip
    """Final losses by contender, same seed and data, and of float32 under a second seed: what seeds make out."""
    runs: list[tuple[str, Contender, int]] = [("fp32", FP32, 0)]
    runs += [(contender.name, contender, 0) for contender in contenders]
    runs.insert(3, ("fp32, another seed", FP32, 1))  # behind what matters most, should the time run out
    results: list[dict[str, Any]] = []
    about: dict[str, Any] = {"steps": steps, "settled after": SETTLED}
    reference: float | None = None
    for name, contender, seed in runs:
        if clock.left <= reserve:
            about["cut short"] = f"left out: {clock.spent}"
            results.append({"name": name, "error": about["cut short"]})
            continue
        try:
            found = _train(contender, work, device, steps, seed)
        except Exception as error:
            results.append({"name": name, "error": failure(name, error, tell)})
            free()
            continue
        if name == "fp32":
            reference = found["loss"]
        found["against fp32"] = found["loss"] / reference - 1 if reference else None
        results.append({"name": name, **found})
        free()
    what = f"{steps} steps, mean loss of the last {min(TAIL, steps)}"
    return TrainingRow(part=part, name=f"{part}, {work.name}", what=what, contenders=results, about=about)


def _train(contender: Contender, work: Work, device: torch.device, steps: int, seed: int) -> dict[str, Any]:
    trainer = Trainer(contender, work, device, seed=seed)
    losses: list[Tensor] = []
    skips: list[int] = []
    scale = 1.0
    try:
        trainer.take_turn()
        for index in range(steps):
            before = trainer.scaler.get_scale() if trainer.scaler is not None else 1.0
            losses.append(trainer.train(*trainer.data(index)))
            if trainer.session is not None:
                report = trainer.session.last_step
                assert report is not None
                skipped, scale = report.skipped, report.scale
            else:
                assert trainer.scaler is not None
                scale = trainer.scaler.get_scale()
                skipped = scale < before
            if skipped:
                skips.append(index)
        values = torch.stack(losses).float().tolist()
    finally:
        trainer.close()
    return {"loss": statistics.fmean(values[-TAIL:]), "skips": skips, "last scale": scale, "losses": values}
