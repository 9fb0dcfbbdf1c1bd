"""The suites of `preamp bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocast import autocast
from ..errors import PolicyError
from ..report import Table
from ..zoo.bert import Attention, Layer
from ._race import Outcome, race, race_row, race_table
from ._results import EVERYTHING, AnyRow, Missing, Row
from ._schedules import ScheduleRow, schedule_table, schedules
from ._step_suite import step
from .models import models
from .training import BF16, Batch, Contender, Trainer, Work, training, training_table

Region = Callable[..., Any]
"""`torch.autocast`, or ours."""


class AttentionByHand(Attention):
    """Attention with its softmax written out, so that the rule for softmax is at work too."""

    softmax_dtype: torch.dtype | None = None

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Three times (N, heads, T, hidden / heads) to the same, once."""
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        mixed: Tensor = scores.softmax(-1, dtype=self.softmax_dtype) @ value
        return mixed


def transformer(layers: int = 12, width: int = 256, heads: int = 4, *, by_hand: bool = False) -> nn.Sequential:
    """A pre-norm encoder of `layers` layers; `by_hand`: with `AttentionByHand`."""
    torch.manual_seed(0)
    encoder = [Layer(width, heads) for _ in range(layers)]
    for layer in encoder if by_hand else ():
        layer.attention = AttentionByHand(width, heads)
    return nn.Sequential(*encoder)


def regions(
    device: torch.device, rounds: int, tell: Callable[[str], None], *, missing: Missing = EVERYTHING
) -> Iterator[Row]:
    """What preamp's regions cost over torch's own, in bfloat16."""
    works = _in_regions(device)
    for place, name in missing.numbered(works, str):
        tell(f"{name} ({place})")
        what, number, run = works[name]
        contenders = {"torch.autocast": partial(run, torch.autocast), "preamp.autocast": partial(run, autocast)}
        yield race_row(name, what, _isolated(contenders, rounds, number, device))
    autocast.uninstall()


def _in_regions(device: torch.device) -> Mapping[str, tuple[str, int, Callable[[Region], None]]]:
    """By name: what is done in a region, how many times at once, and the work."""
    dtype = torch.bfloat16
    x = torch.randn(4, 64, 256, device=device)
    low = torch.randn(8, 8, device=device, dtype=dtype)
    square = torch.randn(8, 8, device=device)

    def train_step(model: nn.Module) -> Callable[[Region], None]:
        def step(region: Region) -> None:
            with region(device.type, dtype=dtype):
                loss = model(x).float().pow(2).mean()
            loss.backward()
            model.zero_grad()

        return step

    def operator(run: Callable[[], Any]) -> Callable[[Region], None]:
        def repeat(region: Region) -> None:
            with region(device.type, dtype=dtype):
                for _ in range(200):
                    run()

        return repeat

    def enter(region: Region) -> None:
        with region(device.type, dtype=dtype):
            pass

    by_hand = train_step(transformer(by_hand=True).to(device))

    def same_casts(region: Region) -> None:
        """The model itself asks torch.autocast for what preamp's rule does: the cost without the meaning."""
        AttentionByHand.softmax_dtype = torch.float32 if region is torch.autocast else None
        try:
            by_hand(region)
        finally:
            AttentionByHand.softmax_dtype = None

    return {
        "transformer step": (
            "12 layers, width 256, batch 4 x 64, forward and backward",
            3,
            train_step(transformer().to(device)),
        ),
        "transformer step, attention by hand": (
            "the same with its softmax written out, which torch leaves in bfloat16 on a CPU",
            3,
            by_hand,
        ),
        "transformer step, the same casts": (
            "attention by hand again; for torch the model itself asks for softmax in float32",
            3,
            same_casts,
        ),
        "empty region": ("enter and leave", 500, enter),
        "unruled operator": ("200 x gelu of 8x8", 20, operator(lambda: F.gelu(low))),
        "low operator": ("200 x mm of 8x8", 20, operator(lambda: square.mm(square))),
        "full operator": ("200 x softmax of 8x8", 20, operator(lambda: low.softmax(-1))),
    }


def _isolated(
    contenders: Mapping[str, Callable[[], None]], rounds: int, number: int, device: torch.device
) -> list[Outcome]:
    """A race in which torch.autocast runs without preamp's rules in the dispatcher, as in a process of its own."""
    reference, ours = list(contenders)
    paired: dict[str, list[float]] = {reference: [], ours: []}
    for index in range(rounds):
        order = (reference, ours) if index % 2 == 0 else (ours, reference)
        for name in order:
            autocast.uninstall()
            for _ in range(3):  # (installing rules leaves cold caches behind)
                contenders[name]()
            (outcome,) = race({name: contenders[name]}, rounds=1, number=number, device=device)
            paired[name].append(outcome.seconds[0])
    ratios = tuple(r / t for r, t in zip(paired[reference], paired[ours], strict=True))
    return [
        Outcome(reference, tuple(paired[reference]), tuple(1.0 for _ in ratios)),
        Outcome(ours, tuple(paired[ours]), ratios),
    ]


def sessions(
    device: torch.device, rounds: int, tell: Callable[[str], None], *, missing: Missing = EVERYTHING
) -> Iterator[Row]:
    """Whole training steps through a session against the same loop written for torch.amp, in bfloat16."""

    def batch(generator: torch.Generator, count: int) -> Batch:
        x = torch.randn(count, 64, 256, generator=generator, device=generator.device)
        return x, x

    work = Work(
        name="training step",
        what="4 layers, width 256, batch 4 x 64, AdamW(fused), clipping",
        build=lambda: transformer(4),
        batch=batch,
        loss=lambda output, _: output.float().pow(2).mean(),
        count=4,
        optimizer="AdamW",
        clip=1.0,
    )
    contenders = [Contender(name="torch.amp", dtype=BF16)]
    for level in ("O4", "O5"):
        contenders.append(Contender(name=f"preamp {level}", level=level, torchs_optimizer=True))
        contenders.append(Contender(name=f"preamp {level}, preamp.optim", level=level))
    for name in missing.of([work.name], str):
        tell("transformer, 4 layers")
        with ExitStack() as stack:
            trainers = [stack.enter_context(closing(Trainer(each, work, device))) for each in contenders]
            steps = {trainer.contender.name: trainer.step for trainer in trainers}
            yield race_row(name, work.what, race(steps, rounds=rounds, device=device))


SUITES: dict[str, Callable[..., Iterable[AnyRow]]] = {
    "regions": regions,
    "sessions": sessions,
    "step": step,
    "schedules": schedules,
    "training": training,
    "models": models,
}
"""Called with a device, rounds, whom to tell, and `missing=`: each gives a row as soon as it is measured."""

PARTS = {suite.name: suite.groups for suite in (training, models)}
"""The suites of which parts can be asked for, that have a size and go by a budget of seconds; no two share a part."""


def suite_named(name: str) -> Callable[..., Iterable[AnyRow]]:
    """A suite by name, or an error that lists them."""
    if name not in SUITES:
        raise PolicyError(f"there is no suite {name!r}; the suites are {', '.join(SUITES)}")
    return SUITES[name]


def suite_table(name: str, rows: Sequence[AnyRow], hardware: str) -> Table:
    """What a suite's rows are printed as; `hardware` is what they were measured on."""
    if name == "schedules":
        return schedule_table([row for row in rows if isinstance(row, ScheduleRow)])
    made = training_table if name in PARTS else race_table
    return made(name, [row for row in rows if isinstance(row, Row)], hardware)
