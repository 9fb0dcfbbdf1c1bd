"""Tables of what can be said about a GPU without one: simulated kernels, and the host time of a step."""

from __future__ import annotations

from typing import Any

from preamp.report import Column, Table

from .docs_results import committed, in_field_terms

_HOW = "python -m benchmarks.simulation"


@committed("simulation", _HOW)
def simulated_kernels(results: dict[str, Any]) -> tuple[Table, str]:
    """What each kernel takes of a processor, and how near the bandwidth of copying it comes in the simulation."""
    names = [device["name"] for device in results["devices"]]
    rows = [
        (in_field_terms(row["name"]), row["registers"], row["warps"], _issued(row), row["barriers"], row["bytes"],
         *(f"{_range(row['attained'][name], 100, 0)} %" for name in names))
        for row in results["rows"]
    ]  # fmt: skip
    columns: tuple[Column | str, ...] = (
        "kernel", Column("registers", digits=0), Column("warps", digits=0), Column("instructions", digits=1),
        Column("barriers", digits=0), Column("bytes", digits=2), *(f"of copying, {name}" for name in names),
    )  # fmt: skip
    rates = ", ".join(f"{device['name']} {device['bandwidth'] / 1e12:.1f} TB/s" for device in results["devices"])
    text = (
        "**Simulated, not measured.** Registers of a thread; warps that a multiprocessor holds; instructions that a "
        "warp issues for 32 elements; barriers of a program; bytes an element to and from device memory; share of "
        "the bandwidth that copying is taken to "
        f"attain ({rates}), for memory latencies of {_range(results['latencies'], 1, 0)} cycles. Compiled by Triton "
        f"{results['environment']['triton']}, preamp at {results['environment']['commit']}"
    )
    return Table("", columns, rows), text


@committed("simulation", _HOW)
def simulated_steps(results: dict[str, Any]) -> tuple[Table, str]:
    """Whole steps beside torch's, in the simulation."""
    names = [device["name"] for device in results["devices"]]
    rows = [
        (step["name"], step["bytes"], step["versus"], step["torch's bytes"],
         *(_range(step["ratios"][name], 1, 2) for name in names), f"{step['least']}" if step["goal"] else "")
        for step in results["steps"]
    ]  # fmt: skip
    columns: tuple[Column | str, ...] = (
        "step", Column("bytes", digits=1), "beside fused Adam with", Column("its bytes", digits=0), *names, "goal",
    )  # fmt: skip
    text = (
        "**Simulated, not measured:** torch's time over ours. With a loss scale, ours is the reading of the gradients "
        f"and one kernel; torch's kernels are taken to run at {100 * results[_SHARE]:.0f} % of the bandwidth of "
        "copying. "
        f"Preamp at {results['environment']['commit']}"
    )
    return Table("", columns, rows), text


@committed("host-time", "python -m benchmarks.host_time")
def host_time(results: dict[str, Any]) -> tuple[Table, str]:
    """The host time of a step."""
    rows = [
        (row["name"], one["name"], 1e3 * one["stats"]["median"], 1 / one["ratio"]["median"],
         f"{1 / one['ratio']['high']:.2f} to {1 / one['ratio']['low']:.2f}", one["counts"]["launches"])
        for row in results["suites"]["host time"] for one in row["contenders"]
    ]  # fmt: skip
    columns = ("list", "contender", Column("median", "ms", 2), Column("of torch's", digits=2),
               Column("interval", align="right"), Column("launches", digits=0))  # fmt: skip
    about = results["environment"]
    text = (
        "Host time of a backward pass of one number, the step and the update of the scale, on a fake CUDA device that "
        f"computes nothing; {results['rounds']} rounds. {about['cpu']}, torch {about['torch']}, preamp at "
        f"{about['commit']}"
    )
    return Table("", columns, rows), text


def _issued(row: dict[str, Any]) -> float:
    """Instructions for 32 elements."""
    return 32 * float(row["instructions"]) * float(row["program's warps"]) / float(row["elements"])


_SHARE = "torch's share"


def _range(values: list[float], times: float, digits: int) -> str:
    low, high = (f"{times * value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
