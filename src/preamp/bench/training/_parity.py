"""Does training arrive where float32 arrives? And the largest batch that fits in a quarter of the memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._results import failure
from ._contenders import EAGER, O2, O5_EIGHT, O5_SPLIT, PARITY, REFERENCE, Contender, Trainer
from ._measure import Clock, Tell, free, quiet
from ._rows import TrainingRow
from ._works import Work

FP32 = next(contender for contender in EAGER if contender.name == "fp32")
TAIL = 20
"""Steps at the end whose mean loss is the final one."""
SETTLED = 50
"""Steps after which a scale should have found its place."""


def parity_row(
    work: Work, device: torch.device, steps: int, clock: Clock, reserve: float = 0.0, tell: Tell = quiet
) -> TrainingRow:
    """Final losses by contender, same seed and data, and of float32 under a second seed: what seeds make out."""
    runs: list[tuple[str, Contender, int]] = [("fp32", FP32, 0)]
    runs += [(contender.name, contender, 0) for contender in PARITY]
    runs.insert(3, ("fp32, another seed", FP32, 1))  # behind what matters most, should the time run out
    told: list[dict[str, Any]] = []
    about: dict[str, Any] = {"steps": steps, "settled after": SETTLED}
    yardstick: float | None = None
    for name, contender, seed in runs:
        if clock.left <= reserve:
            about["cut short"] = f"left out: {clock.spent}"
            told.append({"name": name, "error": about["cut short"]})
            continue
        try:
            found = _train(contender, work, device, steps, seed)
        except Exception as error:
            told.append({"name": name, "error": failure(name, error, tell)})
            free()
            continue
        if name == "fp32":
            yardstick = found["loss"]
        found["against fp32"] = found["loss"] / yardstick - 1 if yardstick else None
        told.append({"name": name, **found})
        free()
    what = f"{steps} steps, mean loss of the last {min(TAIL, steps)}"
    return TrainingRow(part="parity", name=f"parity, {work.name}", what=what, contenders=told, about=about)


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


# -- the largest batch

BATCHES: Sequence[int] = range(8, 64, 8)
"""Seven sizes, so that three probes decide."""

SEARCHED: tuple[Contender, ...] = (REFERENCE, O2, O5_SPLIT, O5_EIGHT)


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of ascending `sizes` that fits, by bisection; 0 if none does."""
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else 0


def batch_row(
    work: Work, device: torch.device, clock: Clock, share: float = 0.25, sizes: Sequence[int] = BATCHES,
    tell: Tell = quiet,
) -> TrainingRow:  # fmt: skip
    """The largest batch of each contender that trains in `share` of the device's memory."""
    told: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for contender in SEARCHED:
        if clock.left <= 5:
            about["cut short"] = f"left out: {clock.spent}"
            told.append({"name": contender.name, "error": about["cut short"]})
            continue
        try:
            told.append({"name": contender.name, "batch": largest(sizes, _fitting(contender, work, device, share))})
        except Exception as error:
            told.append({"name": contender.name, "error": failure(contender.name, error, tell)})
    what = f"the largest of {', '.join(map(str, sizes))} that trains in {share:.0%} of the memory"
    name = f"largest batch, {work.name}"
    return TrainingRow(part="largest batch", name=name, what=what, contenders=told, about=about)


def _limit(share: float, device: torch.device) -> None:
    free()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def _fitting(contender: Contender, work: Work, device: torch.device, share: float) -> Callable[[int], bool]:
    def fits(count: int) -> bool:
        trainer: Trainer | None = None
        _limit(share, device)
        try:
            trainer = Trainer(contender, work, device, count=count)
            trainer.take_turn()
            for _ in range(2):
                trainer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            return False
        finally:
            _limit(1.0, device)  # closing a session with split masters takes memory for a moment
            if trainer is not None:
                trainer.close()
            del trainer
            free()
        return True

    return fits
