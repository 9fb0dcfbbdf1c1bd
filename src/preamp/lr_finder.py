"""The learning-rate range test, run through the session, so that it includes the effects of mixed precision.

The rate grows geometrically from batch to batch while the loss is watched (Smith 2017, arXiv 1506.01186). A batch whose
gradients overflow is skipped by the loss scale; its loss says nothing about the rate, so it is counted and left out.
Afterwards weights, buffers, optimizer, scale and random numbers are restored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import PreampError, SessionError
from .ledger import parameters_of
from .machine import random_kept
from .session import Session
from .sharding import reshard


@dataclass(frozen=True, kw_only=True)
class LrCurve:
    """A range test: rates, losses, and what they suggest. Skipped steps are not among the points."""

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    """Bias-corrected exponential average of the losses."""
    skipped: int
    """Steps whose gradients were not finite."""
    diverged: bool
    """Whether the test stopped because the loss left its range, before the last rate."""
    steepest: float | None
    """Rate at which the smoothed loss falls fastest."""
    valley: float | None
    """Rate two thirds down the longest fall of the smoothed loss; fastai's choice, and the one to try first."""
    minimum_tenth: float | None
    """A tenth of the rate with the smallest smoothed loss."""

    @property
    def suggestions(self) -> dict[str, float]:
        """The suggestions that there are, by name."""
        named = {"valley": self.valley, "steepest": self.steepest, "minimum/10": self.minimum_tenth}
        return {name: value for name, value in named.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Every field."""
        return {**self.__dict__, "suggestions": self.suggestions}


def sweep(
    session: Session,
    loader: Iterable[Any],
    loss_fn: Callable[[Any], Tensor],
    *,
    start_lr: float = 1e-7,
    end_lr: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    stop_factor: float = 4.0,
    clip: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> LrCurve:
    """Train `steps` batches while the rate grows from `start_lr` to `end_lr`; then restore everything.

    Parameter groups keep the ratios of their rates.

    Args:
        session: Of model and optimizer; all that the test changes is put back.
        loader: Batches; it is restarted when it ends.
        loss_fn: The 0-d loss of a batch; called inside `session.autocast()`.
        start_lr: The first rate.
        end_lr: The last rate.
        steps: How many rates to try, at least 4.
        smoothing: Weight of the past in the average of losses, in [0, 1).
        stop_factor: Stop once the smoothed loss exceeds the best by this factor, or is not finite.
        clip: The norm to which gradients are clipped, as in training.
        on_step: Called after each step with its number.

    Raises:
        PreampError: For arguments out of range, an empty loader, and when every step was skipped.

    >>> curve = preamp.lr_finder.sweep(session, loader, lambda batch: loss_fn(model(batch[0]), batch[1]))
    """
    if not 0 < start_lr < end_lr or not math.isfinite(end_lr):
        raise PreampError(f"a sweep needs 0 < start_lr < end_lr; got {start_lr!r} and {end_lr!r}")
    if steps < 4 or not 0 <= smoothing < 1 or stop_factor <= 1:
        raise PreampError(
            f"a sweep needs steps >= 4, 0 <= smoothing < 1 and stop_factor > 1; got {steps!r}, {smoothing!r} and "
            f"{stop_factor!r}"
        )
    optimizers = list(session.optimizers.values())
    if not optimizers:
        raise SessionError("a sweep trains, and this session was prepared without an optimizer")
    shares = [(group, _share(group, o)) for o in optimizers for group in o.param_groups]
    lrs: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    skipped, average, best, diverged = 0, 0.0, math.inf, False
    batches = _endless(loader)
    with _everything_restored(session):
        for step in range(steps):
            lr = start_lr * (end_lr / start_lr) ** (step / (steps - 1))
            for group, share in shares:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr * share)
                else:
                    group["lr"] = lr * share
            with session.autocast():
                loss = loss_fn(next(batches))
            session.backward(loss)
            if clip is not None:
                session.clip_grad_norm_(clip)
            report = session.step()
            session.zero_grad()
            value = loss.detach().item()
            on_step(step)
            diverged = not math.isfinite(value)
            if report.skipped or diverged:
                skipped += report.skipped
            else:
                average = smoothing * average + (1 - smoothing) * value
                corrected = average / (1 - smoothing ** (len(losses) + 1))
                lrs.append(lr)
                losses.append(value)
                smoothed.append(corrected)
                best = min(best, corrected)
                diverged = len(losses) > 10 and corrected > stop_factor * best and best > 0
            if diverged:
                break
    if not lrs:
        raise PreampError(f"all {skipped} steps were skipped or lost: gradients or losses were never finite")
    return LrCurve(
        lrs=tuple(lrs), losses=tuple(losses), smoothed=tuple(smoothed), skipped=skipped, diverged=diverged,
        steepest=_steepest(lrs, smoothed), valley=_valley(lrs, smoothed),
        minimum_tenth=lrs[int(np.argmin(smoothed))] / 10 if len(lrs) >= 3 else None,
    )  # fmt: skip


def _share(group: dict[str, Any], optimizer: Optimizer) -> float:
    """A group's rate relative to the largest of its optimizer."""
    top = max(float(g["lr"]) for g in optimizer.param_groups)
    return float(group["lr"]) / top if top > 0 else 1.0


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise PreampError("the loader gave no batch; a generator is read only once: give a list or a DataLoader")


def _steepest(lrs: list[float], smoothed: list[float]) -> float | None:
    if len(lrs) < 3:
        return None
    slopes = np.gradient(smoothed, np.log(lrs))
    index = int(slopes.argmin())
    return lrs[index] if slopes[index] < 0 else None


def _valley(lrs: list[float], smoothed: list[float]) -> float | None:
    """The longest stretch over which the smoothed loss falls; two thirds along it."""
    best, start = (0, 0), 0
    for index in range(1, len(smoothed) + 1):
        if index == len(smoothed) or smoothed[index] >= smoothed[index - 1]:
            if index - 1 - start > best[1] - best[0]:
                best = (start, index - 1)
            start = index
    length = best[1] - best[0]
    return lrs[best[0] + round(length * 2 / 3)] if length >= 2 else None


@contextmanager
def _everything_restored(session: Session) -> Iterator[None]:
    """Models, optimizers, session and random generators as they were, whatever happens inside."""
    session.zero_grad()
    models, optimizers = session.models.values(), session.optimizers.values()
    reshard(models)
    held = [t for model in models for t in (*model.parameters(), *model.buffers())]
    stepped = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    before = [(tensor, tensor.detach().clone()) for tensor in dict.fromkeys([*held, *stepped])]
    kept = copy.deepcopy(session.state_dict())
    snapshots = [(o, _optimizer_snapshot(o)) for o in optimizers]
    try:
        with random_kept():
            yield
    finally:
        session.zero_grad()
        reshard(models)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        session.load_state_dict(kept)
        for optimizer, snapshot in snapshots:
            _restore_optimizer(optimizer, *snapshot)


def _optimizer_snapshot(optimizer: Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    memo: dict[int, Any] = {}  # one for all: what parameters share (a count of steps) they share afterwards
    state = {parameter: copy.deepcopy(values, memo) for parameter, values in optimizer.state.items()}
    groups = [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state, groups


def _restore_optimizer(optimizer: Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        lr = group["lr"]
        group.update(kept)
        if isinstance(lr, Tensor):  # a tensor rate is known to captured graphs: keep the object
            group["lr"] = lr.copy_(kept["lr"])
