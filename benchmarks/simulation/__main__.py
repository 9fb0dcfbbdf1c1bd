"""Simulates what the kernels of preamp make of an H100's and an H200's memory, prints tables, and writes the results.

    PYTHONPATH=src .venv/triton-3.6/bin/python -m benchmarks.simulation [part of a name ...]

No GPU is needed: the kernels are compiled for sm_90 by the Triton of the Python at hand (3.6 is what many machines with
a GPU have), one block of each is carried out to learn what its warps issue (`block`), and a processor that runs such
blocks is simulated (`processor`). With parts of names it simulates the kernels that have one of them in their names,
and writes nothing.

A whole step is put beside torch.amp with GradScaler and fused Adam, of whose kernels no code is at hand: it is taken to
move its bytes at 90 % of the bandwidth of copying. Launches and gaps between kernels are left out on both sides.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from preamp.machine import environment

from .kernels import CASES, Case, make
from .processor import DEVICES, LATENCIES, resident, simulate

TORCH_BYTES = {"torch.amp and GradScaler": 52, "torch.amp without GradScaler": 40}
"""Of one element in a step of fused Adam: casts of the weight (6) and the gradient (6), the search for infinities,
which stores what it read (8), and Adam (28), which with GradScaler stores the gradients, too (4)."""
TORCH_SHARE = 0.9
"""Of the bandwidth of copying, that torch's kernels are taken to reach. Assumed."""
READ = "reading float16 gradients"
STEPS = (
    ("Adam: float32 masters, float16 gradients and weights", READ, "torch.amp and GradScaler", "G1", 1.6),
    ("8-bit Adam: float32 masters, float16 gradients and weights", READ, "torch.amp and GradScaler", "G2", 2.0),
    ("Adam: float32 masters, bfloat16 gradients and weights", None, "torch.amp without GradScaler", None, None),
    ("Adam: split bfloat16 masters", None, "torch.amp without GradScaler", None, None),
    ("8-bit Adam: split bfloat16 masters", None, "torch.amp without GradScaler", None, None),
)
"""Kernel of the step, kernel that reads the gradients, what both are compared with, and the goal for the ratio."""


def row_of(case: Case) -> dict[str, Any]:
    """What a kernel takes, and by device the share of the bandwidth of copying for each latency."""
    made, _ = make(case)
    blocks = resident(made.registers, made.shared, case.warps)
    trace = made.traces[0]
    attained: dict[str, list[float]] = {}
    for device in DEVICES:
        for latency in LATENCIES:
            result = simulate(made.traces, blocks, device, latency)
            attained.setdefault(device.name, []).append(result.moved / result.cycles / device.share)
    return {
        "name": case.name, "kernel": case.kernel.__name__, "registers": made.registers, "shared": made.shared,
        "warps": blocks * case.warps, "program's warps": case.warps, "instructions": len(trace),
        "barriers": sum(event.instruction.kind == "BAR" for event in trace), "elements": case.elements,
        "bytes": result.moved / case.elements, "attained": attained,
    }  # fmt: skip


def _time(kernels: list[dict[str, Any]], shares: tuple[float, ...]) -> float:
    """Of an element, in what copying a byte takes."""
    return sum(float(one["bytes"]) / share for one, share in zip(kernels, shares, strict=True))


def steps_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole steps beside torch's, by device and latency: torch's time over ours."""
    named = {row["name"]: row for row in rows}
    steps = []
    for name, reading, versus, goal, least in STEPS:
        kernels = [named[part] for part in (reading, name) if part]
        ratios = {
            device.name: [
                TORCH_BYTES[versus] / TORCH_SHARE / _time(kernels, shares)
                for shares in zip(*(one["attained"][device.name] for one in kernels), strict=True)
            ]
            for device in DEVICES
        }
        steps.append({"name": name, "kernels": [one["name"] for one in kernels], "versus": versus, "ratios": ratios,
                      "bytes": sum(one["bytes"] for one in kernels), "torch's bytes": TORCH_BYTES[versus],
                      "goal": goal, "least": least})  # fmt: skip
    return steps


def main(parts: list[str]) -> None:
    """Simulate, print, write."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if not parts or any(part in case.name for part in parts):
            rows.append(row_of(case))
            print(_told(rows[-1]), flush=True)
    if parts:
        return
    steps = steps_of(rows)
    for step in steps:
        told = "; ".join(f"{name} {min(each):.2f} to {max(each):.2f}" for name, each in step["ratios"].items())
        print(f"step, {step['name']}: simulated {told} times as fast as {step['versus']}")
    found = environment(torch.device("cpu")) | {"triton": triton.__version__}
    content = {
        "schema": "preamp-bench/1", "environment": found, "simulated": True,
        "devices": [asdict(device) for device in DEVICES], "latencies": LATENCIES, "torch's share": TORCH_SHARE,
        "rows": rows, "steps": steps,
    }  # fmt: skip
    path = Path(__file__).parents[1] / "results" / f"simulation_sm90_{time.strftime('%Y-%m-%d')}_{found['commit']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(path.name)


def _told(row: dict[str, Any]) -> str:
    shares = "; ".join(f"{name} {min(each):.0%} to {max(each):.0%}" for name, each in row["attained"].items())
    return (
        f"{row['name']}: {row['registers']} registers, {row['warps']} warps, {row['instructions']} instructions, "
        f"{row['barriers']} barriers, {row['bytes']:.2f} bytes an element; of copying, simulated: {shares}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
