"""The suites of `preamp bench`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..autocast import autocast
from ..errors import PolicyError
from ..ledger import shadows_work
from ..optim import AdamW
from ..report import Table
from ..session import prepare
from ._race import Outcome, Row, race, race_table
from ._results import EVERYTHING, AnyRow, Missing
from ._schedules import ScheduleRow, schedule_table, schedules
from ._step_suite import step
from .models import GROUPS as MODELS_GROUPS
from .models import models
from .training import GROUPS as TRAINING_GROUPS
from .training import TrainingRow, training, training_table

Suite = Callable[..., Iterable[AnyRow]]
"""Called with a device, rounds, whom to tell, and `missing=`: gives each row as soon as it is measured."""


class Block(nn.Module):
    """A transformer layer; with `by_hand` its attention is written out, so that the rule for softmax is at work too."""

    softmax_dtype: torch.dtype | None = None

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same shape."""
        n, t, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
            attended = scores.softmax(-1, dtype=self.softmax_dtype) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(n, t, width))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return hidden


def transformer(layers: int = 12, width: int = 256, heads: int = 4, *, by_hand: bool = False) -> nn.Sequential:
    """A pre-norm encoder of `layers` blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, heads, by_hand) for _ in range(layers)))


def regions(
    device: torch.device, rounds: int, tell: Callable[[str], None], *, missing: Missing = EVERYTHING
) -> Iterator[Row]:
    """What preamp's regions cost over torch's own, in bfloat16."""
    dtype = torch.bfloat16
    x = torch.randn(4, 64, 256, device=device)
    models = {by_hand: transformer(by_hand=by_hand).to(device) for by_hand in (False, True)}

    def train_step(region: Callable[..., Any], by_hand: bool = False) -> Callable[[], None]:
        model = models[by_hand]

        def step() -> None:
            with region(device.type, dtype=dtype):
                loss = model(x).float().pow(2).mean()
            loss.backward()
            model.zero_grad()

        return step

    def train_step_full_softmax(region: Callable[..., Any]) -> Callable[[], None]:
        """torch.autocast doing by request of the model what preamp's rule does: for the cost without the meaning."""
        step = train_step(region, by_hand=True)

        def asked() -> None:
            Block.softmax_dtype = torch.float32
            try:
                step()
            finally:
                Block.softmax_dtype = None

        return asked

    def enter(region: Callable[..., Any]) -> Callable[[], None]:
        def go() -> None:
            with region(device.type, dtype=dtype):
                pass

        return go

    low = torch.randn(8, 8, device=device, dtype=dtype)
    square = torch.randn(8, 8, device=device)

    def operator(region: Callable[..., Any], run: Callable[[], Any]) -> Callable[[], None]:
        def go() -> None:
            with region(device.type, dtype=dtype):
                for _ in range(200):
                    run()

        return go

    work: Mapping[str, tuple[str, int, Callable[[Callable[..., Any]], Callable[[], None]]]] = {
        "transformer step": ("12 layers, width 256, batch 4 x 64, forward and backward", 3, train_step),
        "transformer step, attention by hand": (
            "the same with its softmax written out, which torch leaves in bfloat16 on a CPU",
            3,
            lambda region: train_step(region, by_hand=True),
        ),
        "transformer step, the same casts": (
            "attention by hand again; for torch the model itself asks for softmax in float32",
            3,
            lambda region: train_step_full_softmax(region) if region is torch.autocast else train_step(region, True),
        ),
        "empty region": ("enter and leave", 500, enter),
        "unruled operator": ("200 x gelu of 8x8", 20, lambda region: operator(region, lambda: F.gelu(low))),
        "low operator": ("200 x mm of 8x8", 20, lambda region: operator(region, lambda: square.mm(square))),
        "full operator": ("200 x softmax of 8x8", 20, lambda region: operator(region, lambda: low.softmax(-1))),
    }
    for name in missing.of(work, str):
        tell(name)
        what, number, make = work[name]
        contenders = {"torch.autocast": make(torch.autocast), "preamp.autocast": make(autocast)}
        yield Row(name, what, _isolated(contenders, rounds, number, device))
    autocast.uninstall()


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
    x = torch.randn(4, 64, 256, device=device)

    def with_torch() -> Callable[[], None]:
        model = transformer(4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def with_session(level: str, kind: Callable[..., torch.optim.Optimizer], **choices: Any) -> Callable[[], None]:
        model = transformer(4).to(device)
        optimizer = kind(model.parameters())
        session = prepare(model, optimizer, level=level, **choices)

        def step() -> None:
            with session.autocast():
                loss = model(x).float().pow(2).mean()
            session.backward(loss)
            session.clip_grad_norm_(1.0)
            session.step()
            session.zero_grad()

        return step

    for name in missing.of(["training step"], str):
        tell("transformer, 4 layers")
        contenders = {"torch.amp": with_torch()}
        for level in ("O4", "O5"):
            contenders[f"preamp {level}"] = with_session(level, functools.partial(torch.optim.AdamW, fused=True))
            contenders[f"preamp {level}, preamp.optim"] = with_session(level, AdamW)
        if shadows_work(device.type, torch.bfloat16):
            contenders["preamp O4, preamp.optim, shadow"] = with_session("O4", AdamW, shadow=True)
        outcomes = race(contenders, rounds=rounds, device=device)
        yield Row(name, "4 layers, width 256, batch 4 x 64, AdamW(fused), clipping", outcomes)


SUITES: dict[str, Suite] = {
    "regions": regions,
    "sessions": sessions,
    "step": step,
    "schedules": schedules,
    "training": training,
    "models": models,
}

PARTS: dict[str, tuple[str, ...]] = {"training": TRAINING_GROUPS, "models": MODELS_GROUPS}
"""The suites of which parts can be asked for, that have a size and go by a budget of seconds; no two share a part."""


def suite_named(name: str) -> Suite:
    """A suite by name, or an error that lists them."""
    if name not in SUITES:
        raise PolicyError(f"there is no suite {name!r}; the suites are {', '.join(SUITES)}")
    return SUITES[name]


def suite_table(name: str, rows: Sequence[AnyRow], hardware: str) -> Table:
    """What a suite's rows are printed as; `hardware` is what they were measured on."""
    replays = [row for row in rows if isinstance(row, ScheduleRow)]
    trained = [row for row in rows if isinstance(row, TrainingRow)]
    if trained:
        return training_table(trained, hardware, name)
    return schedule_table(replays) if replays else race_table(name, [r for r in rows if isinstance(r, Row)], hardware)
