"""Host time of a step, torch's and preamp's, on the fake CUDA device, where no kernel computes anything.

    python -m benchmarks.host_time [--rounds 41] [--out FILE]

prints the table and writes the JSON of a bench. A step is a backward pass of one number, what the scaler or
session does with a list of gradients, and the optimizer. Tensors have eight entries each: their length does not matter
to the host. The time in which torch launches its kernels over lists on a real device (one for each 36 tensors of
Adam's) is not in its figures; each of preamp's launches by Triton is.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.emulator import driver
from tests.pretend.device import pretend
from torch import nn
from torch.nn import Parameter

NATIVE = pretend(1, "-O2")
driver.install(NATIVE, computes=False)
NATIVE.skip_lists()

import preamp  # noqa: E402
from benchmarks.harness import SCHEMA, Setting  # noqa: E402
from benchmarks.race import Entry, race, spread  # noqa: E402
from benchmarks.report import NOTES  # noqa: E402
from preamp.machine import environment  # noqa: E402
from preamp.report import Cell, Column, Table  # noqa: E402

DEVICE = torch.device("cuda", 0)
COUNTS = (394, 1500)
"""Numbers of tensors: that of BERT-large, and that of the longest list in the suite `step`."""

LR = 1e-9
Step = Callable[[], None]


def leaves(count: int) -> nn.ParameterList:
    """Parameters, each an object of its own, as a model has them."""
    return nn.ParameterList([Parameter(torch.ones(4, 2, device=DEVICE)) for _ in range(count)])


def give(params: nn.ParameterList) -> None:
    """Set gradients in the current dtype of the parameters."""
    for param in params:
        param.grad = torch.full_like(param, 1e-3)


def by_scaler(count: int, kind: Callable[..., Any], scaler: Any, **arguments: Any) -> Step:
    """The loop of torch.amp."""
    params = leaves(count)
    optimizer, loss = kind(params.parameters(), lr=LR, **arguments), torch.zeros((), device=DEVICE, requires_grad=True)
    give(params)

    def step() -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def by_session(count: int, level: str, groups: int = 1) -> Step:
    """The loop of preamp; `groups`: the number of parameter groups."""
    params = leaves(count)
    every, loss = list(params), torch.zeros((), device=DEVICE, requires_grad=True)
    dealt = [{"params": every[i::groups], "weight_decay": 0.01 * i} for i in range(groups)]
    session = preamp.prepare(params, preamp.optim.AdamW(dealt, lr=LR), level=level)
    give(params)

    def step() -> None:
        session.backward(loss)
        session.step()

    return step


def contenders(count: int) -> dict[str, Step]:
    """The contenders of a row, the reference first."""
    scalers = torch.amp.GradScaler("cuda", init_scale=2.0**10), preamp.GradScaler("cuda", init_scale=2.0**10)
    return {
        "torch.amp, AdamW(fused)": by_scaler(count, torch.optim.AdamW, scalers[0], fused=True),
        "preamp O2": by_session(count, "O2"),
        "preamp O2, two groups": by_session(count, "O2", 2),
        "preamp O1": by_session(count, "O1"),
        "preamp.GradScaler, preamp.optim": by_scaler(count, preamp.optim.AdamW, scalers[1]),
    }


def launches(step: Step) -> int:
    """The number of kernels that a call launches."""
    before = NATIVE.kernels()
    step()
    return int(NATIVE.kernels() - before)


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Measure one row."""

    def begin(entry: Entry) -> None:
        entry.begin(warm=8)  # states and lists are made, and the first steps check more
        entry.found["counts"] = {"launches": launches(entry.step)}

    def entry(name: str, step: Step) -> Entry:
        return Entry(name, lambda _: step, number=2)

    entries = [entry(name, step) for name, step in contenders(count).items()]
    what = "backward of one number, unscaling, check, AdamW, update of the scale: the host's part"
    found = race(entries, Setting(device=torch.device("cpu"), rounds=rounds), begin)
    return {"name": f"{count} tensors", "what": what, "contenders": found}


def table(rows: list[dict[str, Any]]) -> Table:
    """The table that is printed."""
    columns = ("list", "contender", Column("median", "us", 0), Column("of torch's", "x", 2), Column("low", "x", 2),
               Column("high", "x", 2), "launches")  # fmt: skip
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        torchs = row["contenders"][0]["seconds"]
        for one in row["contenders"]:
            share = spread([own / theirs for own, theirs in zip(one["seconds"], torchs, strict=True)])
            cells.append((row["name"], one["name"], 1e6 * one["stats"]["median"], share["median"], share["low"],
                          share["high"], one["counts"]["launches"]))  # fmt: skip
    return Table("Host time of a step", columns, cells, ("of torch's: below 1 is less, median over rounds", NOTES[1]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path, default=Path("host-time.json"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = [measure(count, asked.rounds) for count in COUNTS]
    print(table(rows).to_text())
    about = {**environment(torch.device("cpu")), "device": "fake CUDA device, no kernel computes"}
    found = {"schema": SCHEMA, "environment": about, "rounds": asked.rounds}
    found["suites"] = {"host time": rows}
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(asked.out)


if __name__ == "__main__":
    main()
