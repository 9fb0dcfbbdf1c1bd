"""One training run of one task under one level: trained for real, and measured."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..formats import name_of
from ..machine import seconds_now
from ..session import Session, prepare
from ..zoo import Recipe, Task


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """By address, the bytes of storages that autograd keeps for backward, but for parameters and buffers."""
    resident = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in resident:
                saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


WARM_UP = 3
"""Steps at the start that do not count for the time."""


@dataclass(kw_only=True)
class Trial:
    """What a run gave. Losses are those of the training batches; scale is that of each step's gradients."""

    task: str
    level: str
    seed: int
    steps: int
    batch_size: int
    parameters: int
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    quality: float | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    @property
    def ms_per_step(self) -> float | None:
        """Median over the steps after warm-up, ms."""
        counted = self.step_ms[WARM_UP:] or self.step_ms
        return statistics.median(counted) if counted else None

    @property
    def final_loss(self) -> float | None:
        """Mean of the last tenth of the losses (at least one)."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return statistics.fmean(tail) if tail else None

    def to_dict(self) -> dict[str, Any]:
        """Every field and figure, in types that JSON takes."""
        return {**asdict(self), "ms_per_step": self.ms_per_step, "final_loss": self.final_loss}


def run_trial(
    task: Task,
    level: str,
    *,
    size: str,
    seed: int,
    device: torch.device,
    recipe: Recipe,
    on_step: Callable[[Trial], None] = lambda trial: None,
    into: list[Trial] | None = None,
) -> Trial:
    """Train `task` under `level` and return what was seen.

    `into`: the trial is appended there before it starts, so that an interrupted run leaves what it has.
    """
    model = task.build(size, seed=seed).to(device)
    optimizer = make_optimizer(recipe, model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.max_lr, total_steps=recipe.steps + 1)
    trial = Trial(
        task=task.name, level=level, seed=seed, steps=recipe.steps, batch_size=recipe.batch_size,
        parameters=sum(p.numel() for p in model.parameters()),
    )  # fmt: skip
    if into is not None:
        into.append(trial)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*eps=.*rounds to zero")  # O3 is shown as it is
        session = prepare(model, optimizer, level=level)
    with session:
        batches = task.batches(size, seed=seed, steps=recipe.steps, batch_size=recipe.batch_size)
        for index, (inputs, target) in enumerate(batches):
            inputs, target = tuple(x.to(device) for x in inputs), target.to(device)
            started = seconds_now(device)
            if index == 1:
                loss = _watched_forward(task, model, session, inputs, target, trial, device)
            else:
                with session.autocast():
                    loss = task.loss(model(*inputs), target)
            session.backward(loss)
            session.clip_grad_norm_(recipe.clip)
            report = session.step()
            session.zero_grad()
            trial.losses.append(float(loss.detach()))
            trial.scales.append(report.scale)
            if report.skipped:
                trial.skipped.append(index)
            else:
                schedule.step()
            trial.step_ms.append((seconds_now(device) - started) * 1e3)
            on_step(trial)
        if device.type == "cuda":
            trial.peak_bytes = torch.cuda.max_memory_allocated(device)
        trial.quality = _evaluate(task, model, session, size, device)
    trial.complete = True
    return trial


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """The recipe's optimizer, fused, so that a step needs no host sync."""
    if recipe.optimizer == "SGD":
        return torch.optim.SGD(
            model.parameters(), recipe.max_lr, momentum=0.9, weight_decay=recipe.weight_decay, fused=True
        )
    return torch.optim.AdamW(model.parameters(), recipe.max_lr, weight_decay=recipe.weight_decay, fused=True)


def _watched_forward(
    task: Task, model: nn.Module, session: Session, inputs: tuple[Tensor, ...], target: Tensor,
    trial: Trial, device: torch.device,
) -> Tensor:  # fmt: skip
    """A forward pass that also notes the dtypes its modules give, and on a CPU the bytes it keeps."""
    seen: Counter[str] = Counter()

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            seen[name_of(output.dtype)] += 1

    leaves = [m for m in model.modules() if next(m.children(), None) is None and next(m.parameters(), None) is not None]
    handles = [leaf.register_forward_hook(note) for leaf in leaves]
    try:
        with saved_bytes(model) as saved, session.autocast():
            loss = task.loss(model(*inputs), target)
    finally:
        for handle in handles:
            handle.remove()
    trial.dtypes = dict(seen.most_common())
    if device.type != "cuda":
        trial.peak_bytes = sum(saved.values()) + session.memory().total
    return loss


def _evaluate(task: Task, model: nn.Module, session: Session, size: str, device: torch.device) -> float:
    """Quality of what was learnt: validated in float32, with the master weights, as README shows it."""
    model.eval()
    try:
        with session.full_precision():
            return task.evaluate(model, size, device=device)
    finally:
        model.train()
