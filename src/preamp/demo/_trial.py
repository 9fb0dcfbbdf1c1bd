"""One training run of one task under one level, on one process or several: trained for real, and measured."""

from __future__ import annotations

import os
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PreampError
from ..formats import name_of
from ..kernels import dense_values
from ..machine import seconds_now
from ..session import Session, prepare
from ..sharding import rank, ranks
from ..tree import tensors
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


def resident_bytes(model: nn.Module, optimizer: Optimizer, session: Session) -> int:
    """Bytes that live through the whole of training: parameters, buffers, masters, optimizer state, gradients."""
    held: list[Tensor] = [*model.parameters(), *model.buffers(), *session.state_dict()["masters"].values()]
    held += tensors(list(optimizer.state.values()))
    held += [torch.empty_like(p, device="meta") for p in model.parameters() if p.requires_grad]
    return sum({id(t): t.nbytes for t in held}.values())  # each object once


WARM_UP = 3
"""Steps at the start that do not count for the time."""

EXPONENTS = range(-60, 24)
"""Powers of two that a histogram of gradients covers; what lies outside counts at its ends."""


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
    gradients: GradientHistogram | None = None
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


@dataclass(frozen=True, kw_only=True)
class GradientHistogram:
    """The true float32 weight gradients of one batch: how many values at each power of two, and what float16 loses.

    Shares are of the values that are not zero. `flushed`: zero in float16; `flushed_scaled`: zero after multiplying by
    `scale`; `subnormal`: below float16's smallest normal, 2**-14; `overflow_scaled`: infinite after multiplying.
    """

    counts: list[int]
    nonzero: int
    zeros: int
    flushed: float
    flushed_scaled: float
    subnormal: float
    overflow_scaled: float
    scale: float


def run_trial(
    task: Task,
    level: str,
    *,
    size: str,
    seed: int,
    device: torch.device,
    recipe: Recipe,
    on_step: Callable[[Trial], None] = lambda trial: None,
    histogram_scale: float | None = None,
    into: list[Trial] | None = None,
) -> Trial:
    """Train `task` under `level` and return what was seen.

    `into`: the trial is appended there before it starts, so that an interrupted run leaves what it has.
    `histogram_scale`: also take the histogram of the last step's gradients, which must be unscaled ones (levels
    without a loss scale), for that scale.
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
        outer = over_ranks(model)
        batches = task.batches(size, seed=seed, steps=recipe.steps, batch_size=recipe.batch_size)
        for index, (inputs, target) in enumerate(batches):
            inputs = tuple(own_part(x, recipe.batch_size).to(device) for x in inputs)
            target = own_part(target, recipe.batch_size).to(device)
            started = seconds_now(device)
            if index == 1:
                loss = _watched_forward(task, model, outer, session, inputs, target, trial, optimizer, device)
            else:
                with session.autocast():
                    loss = task.loss(outer(*inputs), target)
            session.backward(loss)
            if histogram_scale is not None and index == recipe.steps - 1:
                trial.gradients = histogram([p.grad for p in model.parameters() if p.grad is not None], histogram_scale)
            session.clip_grad_norm_(recipe.clip)
            report = session.step()
            session.zero_grad()
            trial.losses.append(float(mean_over_ranks(loss)))
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


def histogram(gradients: list[Tensor], scale: float) -> GradientHistogram:
    """What float16 would make of true float32 gradients, without and with a loss scale."""
    values = torch.cat([dense_values(g).detach().flatten().float().cpu() for g in gradients]).abs()
    present = values[(values > 0) & values.isfinite()]
    _, exponent = torch.frexp(present)  # value = mantissa * 2**exponent with mantissa in [0.5, 1)
    clamped = (exponent - 1).clamp(EXPONENTS.start, EXPONENTS.stop - 1) - EXPONENTS.start
    counts = torch.bincount(clamped, minlength=len(EXPONENTS))
    scaled = (present * scale).half()
    total = max(1, present.numel())
    return GradientHistogram(
        counts=counts.tolist(),
        nonzero=present.numel(),
        zeros=int((values == 0).sum()),
        flushed=int((present.half() == 0).sum()) / total,
        flushed_scaled=int((scaled == 0).sum()) / total,
        subnormal=int((present < 2.0**-14).sum()) / total,
        overflow_scaled=int(scaled.isinf().sum()) / total,
        scale=scale,
    )


def _watched_forward(
    task: Task, model: nn.Module, outer: nn.Module, session: Session, inputs: tuple[Tensor, ...], target: Tensor,
    trial: Trial, optimizer: Optimizer, device: torch.device,
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
            loss = task.loss(outer(*inputs), target)
    finally:
        for handle in handles:
            handle.remove()
    trial.dtypes = dict(seen.most_common())
    if device.type != "cuda":
        trial.peak_bytes = sum(saved.values()) + resident_bytes(model, optimizer, session)
    return loss


def _evaluate(task: Task, model: nn.Module, session: Session, size: str, device: torch.device) -> float:
    """Quality of what was learnt: validated in float32, with the master weights, as README shows it."""
    model.eval()
    try:
        with session.full_precision():
            return task.evaluate(model, size, device=device)
    finally:
        model.train()


# -- several processes


def join_ranks() -> int:
    """Begin a process group where torchrun has started this process; its rank, 0 elsewhere."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if cuda else "gloo")
    return rank()


def over_ranks(model: nn.Module) -> nn.Module:
    """The model as it is called in training: wrapped, where several processes train it."""
    if ranks() == 1:
        return model
    devices = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)


def own_part(batch: Any, batch_size: int) -> Any:
    """Every N-th sample of a batch, of which all ranks have equally many."""
    if batch_size % ranks():
        raise PreampError(f"a batch of {batch_size} samples cannot be shared by {ranks()} processes: take 2 or 4")
    return batch if ranks() == 1 else batch[rank() :: ranks()]


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The loss of the whole batch."""
    loss = loss.detach()
    if ranks() > 1:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= ranks()
    return loss
