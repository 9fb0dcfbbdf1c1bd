"""Does training arrive where float32 arrives?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._results import Row
from ._contenders import EAGER, PARITY, Contender, Trainer
from ._measure import Run
from ._works import Work

FP32 = next(contender for contender in EAGER if contender.name == "fp32")
TAIL = 20
"""Steps at the end whose mean loss is the final one."""
SETTLED = 50
"""Steps after which a scale should have found its place."""


def parity_row(
    run: Run, part: str, work: Work, steps: int, contenders: Sequence[Contender] = PARITY, reserve: float = 0.0
) -> Row:
    """Final losses by contender, same seed and data, and of float32 under a second seed: what seeds make out."""
    names = ["fp32", *(contender.name for contender in contenders)]
    names.insert(3, "fp32, another seed")  # behind what matters most, should the time run out
    by_name = {contender.name: contender for contender in contenders}
    about: dict[str, Any] = {"steps": steps, "settled after": SETTLED}
    reference: list[float] = []

    def measure(name: str) -> dict[str, Any]:
        seed = int(name == "fp32, another seed")
        found = _train(by_name.get(name, FP32), work, run.device, steps, seed)
        if name == "fp32":
            reference.append(found["loss"])
        return {**found, "against fp32": found["loss"] / reference[0] - 1 if any(reference) else None}

    results = run.each(names, measure, reserve, about)
    what = f"{steps} steps, mean loss of the last {min(TAIL, steps)}"
    return Row(part=part, name=f"{part}, {work.name}", what=what, contenders=results, about=about)


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
