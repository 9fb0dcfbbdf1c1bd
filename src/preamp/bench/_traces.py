"""Traces: what the gradients of a float32 training run were, step by step, small enough to be committed.

A loss scale depends on the gradients' magnitudes alone, so a run recorded once can judge any number of schedules
(`_replay.py`). Recorded are true gradients: float32, no loss scale, before clipping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..kernels import dense_values
from ..report.files import write_with
from ..zoo import Task
from ._machine import environment
from ._trial import make_optimizer

LOWEST, HIGHEST = -149, 128
"""Binades of float32: the smallest subnormal is 2**-149, and nothing finite lies above 2**128."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One run's gradients. Arrays have one entry (or row) a step; magnitudes are of true gradients.

    Column c of `counts` (int64) is the binade that ends at 2**(first + c): how many entries lie above half of that
    and not above it. float16 flushes what is at or below 2**-25, so at a scale that is a power of two each binade is
    flushed whole or not at all, and a replay is exact.
    """

    task: str
    first: int
    counts: NDArray[np.int64]
    """(steps, binades): non-zero entries of the weights' gradients."""
    zeros: NDArray[np.int64]
    """(steps,): entries that are 0."""
    weights: NDArray[np.float32]
    """(steps,): the largest magnitude in the gradients of the weights; inf or nan for a bad batch."""
    activations: NDArray[np.float32]
    """(steps,): the largest magnitude in the gradients of the modules' outputs, where float16 may overflow first."""
    about: dict[str, Any]
    """Seed, size, and the machine, versions and commit of the recording."""

    def __post_init__(self) -> None:
        """Refuse arrays of different lengths."""
        lengths = {len(self.counts), len(self.zeros), len(self.weights), len(self.activations)}
        if len(lengths) != 1:
            raise ValueError(f"a trace has one entry a step in each array; these have {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.zeros)

    @property
    def entries(self) -> int:
        """How many numbers a step's gradients have."""
        return int(self.counts[0].sum() + self.zeros[0]) if len(self) else 0

    def save(self, path: str | Path) -> Path:
        """Write an .npz file, compressed, whole or not at all."""
        about = json.dumps({"task": self.task, "first": self.first, **self.about})

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.savez_compressed(
                    file,
                    about=np.array(about),
                    counts=self.counts.astype(np.int32),
                    zeros=self.zeros.astype(np.int32),
                    weights=self.weights,
                    activations=self.activations,
                )

        return write_with(path, write)


def load_trace(path: str | Path) -> Trace:
    """What `Trace.save` wrote."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        return Trace(
            task=about.pop("task"),
            first=about.pop("first"),
            counts=file["counts"].astype(np.int64),
            zeros=file["zeros"].astype(np.int64),
            weights=file["weights"],
            activations=file["activations"],
            about=about,
        )


def trace_of(gradients: Sequence[NDArray[np.float32]], activations: Sequence[float] | None = None) -> Trace:
    """A trace of given gradients, an array a step, with the largest gradient of an activation a step (0: none)."""
    return _trace("made up", list(map(_row, gradients, activations or [0.0] * len(gradients))), {})


_Row = tuple[NDArray[np.int64], int, float, float]
"""Of a step: entries by binade, zeros, largest gradient of a weight and of an activation."""


def _row(values: NDArray[np.float32], activations: float) -> _Row:
    present = np.abs(values[np.isfinite(values) & (values != 0)])
    mantissa, exponent = np.frexp(present)  # value = mantissa * 2**exponent with mantissa in [0.5, 1)
    ends = exponent - (mantissa == 0.5)  # a power of two is the end of its binade (2**(e-1), 2**e]
    counts = np.bincount(ends - LOWEST, minlength=HIGHEST - LOWEST + 1).astype(np.int64)
    return counts, int((values == 0).sum()), np.abs(values).max(initial=0.0), activations


def _trace(task: str, rows: Sequence[_Row], about: dict[str, Any]) -> Trace:
    counts, zeros, weights, activations = zip(*rows, strict=True)
    by_binade = np.stack(counts)
    used = np.flatnonzero(by_binade.any(axis=0))
    start, end = (used[0], used[-1] + 1) if len(used) else (0, 1)
    return Trace(
        task=task,
        first=LOWEST + int(start),
        counts=by_binade[:, start:end],
        zeros=np.array(zeros, np.int64),
        weights=np.array(weights, np.float32),
        activations=np.array(activations, np.float32),
        about=about,
    )


def record(
    task: Task,
    *,
    size: str = "ci",
    seed: int = 0,
    steps: int | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> Trace:
    """Train `task` in float32 on the CPU by its recipe, or only its first `steps`, and return the trace."""
    recipe = task.recipe(size)
    model = task.build(size, seed=seed)
    optimizer = make_optimizer(recipe, model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.max_lr, total_steps=recipe.steps + 1)
    rows: list[_Row] = []
    batches = task.batches(size, seed=seed, steps=steps or recipe.steps, batch_size=recipe.batch_size)
    with _largest_activation_gradients(model) as largest:
        for index, (inputs, target) in enumerate(batches):
            largest.clear()
            task.loss(model(*inputs), target).backward()
            parts = [dense_values(p.grad).flatten() for p in model.parameters() if p.grad is not None]
            rows.append(_row(torch.cat(parts).numpy(), float(torch.stack(largest).amax())))
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            on_step(index)
    return _trace(task.name, rows, {"size": size, "seed": seed, "recorded on": environment(torch.device("cpu"))})


@contextmanager
def _largest_activation_gradients(model: nn.Module) -> Iterator[list[Tensor]]:
    """A list that each backward pass fills with the largest magnitude in the gradient of every module's output."""
    largest: list[Tensor] = []

    def note(gradient: Tensor) -> None:
        largest.append(gradient.detach().abs().amax())

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(note)

    handles = [module.register_forward_hook(watch) for module in model.modules()]
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()
