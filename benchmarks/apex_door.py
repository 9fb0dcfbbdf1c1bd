"""A transformer step at O1 and O4 through preamp.compat.apex, beside preamp's own session at the same level.

    python -m benchmarks.apex_door [--rounds 21] [--out FILE]

Each contender has torch to itself: functions are patched before its turn and put back after it, off the clock. Turns
are interleaved in one process; the ratio of a round is preamp's own time over the door's, so 1 is as fast and 0.95 is
5 % slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import preamp
from preamp.compat.apex import amp
from preamp.machine import environment

from .harness import Setting
from .race import Entry, Step, keep_heap, race
from .regions import transformer

Turn = Callable[[], AbstractContextManager[object]]


def models(by_hand: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The transformer of the suite `regions`, and a step that costs next to nothing."""
    model = transformer(by_hand=by_hand)
    return model, torch.optim.SGD(model.parameters(), 1e-6)


def through_the_door(level: str, by_hand: bool, x: torch.Tensor) -> tuple[Turn, Step]:
    """As a script for Apex is written."""
    model, optimizer = models(by_hand)

    @contextmanager
    def turn() -> Iterator[None]:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1024.0 if level == "O1" else None)
        try:
            yield
        finally:
            amp.close()

    def step() -> None:
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    return turn, step


def own(level: str, by_hand: bool, x: torch.Tensor) -> tuple[Turn, Step]:
    """The same by preamp's session."""
    model, optimizer = models(by_hand)
    sessions: list[preamp.Session] = []

    @contextmanager
    def turn() -> Iterator[None]:
        scale: Any = {"scale": 1024.0} if level == "O1" else {}
        with preamp.prepare(model, optimizer, level=level, **scale) as session:
            sessions[:] = [session]
            yield

    def step() -> None:
        (session,) = sessions
        with session.autocast():
            loss = model(x).float().pow(2).mean()
        session.backward(loss)
        session.step()
        session.zero_grad()

    return turn, step


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/apex_door.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_heap()
    torch.manual_seed(0)
    rows = []
    for level, size, number in (("O4", (4, 64, 256), 3), ("O1", (1, 8, 256), 1)):
        x = torch.randn(size)
        for by_hand in (False, True):
            contenders = {"preamp.prepare": own(level, by_hand, x), "compat.apex": through_the_door(level, by_hand, x)}
            entries = [
                Entry(who, lambda _, step=step: step, turn, before=1, number=number)  # type: ignore[misc]
                for who, (turn, step) in contenders.items()
            ]
            race(entries, Setting(device=torch.device("cpu"), rounds=arguments.rounds))
            seconds = {entry.name: entry.seconds for entry in entries}
            ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)
            name = f"{level}, {'attention by hand' if by_hand else 'SDPA'}, batch {size[0]} x {size[1]}"
            rows.append({"name": name, "seconds": seconds, "ratios": ratios})
            times = "  ".join(f"{who} {statistics.median(s) * 1e3:.1f} ms" for who, s in seconds.items())
            print(f"{name}: {quartiles[1]:.3f} ({quartiles[0]:.3f}-{quartiles[2]:.3f})  {times}", flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    about = environment(torch.device("cpu"))
    result = {"schema": "preamp-bench/1", "suite": "apex_door", "environment": about, "heap kept": True, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
