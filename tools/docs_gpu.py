"""Tables of the documents that are made from the results of `./dev gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import MEASURED_ON
from benchmarks.measures import TAIL
from benchmarks.race import spread

from preamp.report import Column, Table

from .docs_results import committed

EIGHT = "preamp O5, split masters, 8-bit states"
ALIKE = {
    "preamp O1": "torch.amp fp16", "preamp O2": "torch.amp fp16", "preamp O4": "torch.amp bf16",
    "preamp O5": "torch.amp bf16", "preamp O5, split masters": "torch.amp bf16", EIGHT: "torch.amp bf16",
    "preamp O2, captured": "torch.amp fp16, captured",
}  # fmt: skip
"""Contenders of preamp's, and what they are set against: torch.amp of the same dtype, a graph against a graph."""

Contenders = Mapping[str, Mapping[str, Any]]


def contenders_of(row: Mapping[str, Any]) -> Contenders:
    """Those that did not fail, by name."""
    return {each["name"]: each for each in row["contenders"] if not each.get("error")}


def against(found: Contenders, ours: str) -> dict[str, float]:
    """How many times as fast as torch.amp alike, by rounds."""
    pairs = zip(found[ours]["seconds"], found[ALIKE[ours]]["seconds"], strict=True)
    return spread([theirs / own for own, theirs in pairs])


def peak_share(found: Contenders, ours: str) -> float:
    """Peak memory as a share of torch.amp's.

    Of torch.amp bf16's for all that is not captured: torch.amp fp16 ran first and has cuBLAS's workspace in its own.
    """
    theirs = ALIKE[ours] if "captured" in ours else "torch.amp bf16"
    return float(found[ours]["peak bytes"] / found[theirs]["peak bytes"])


def timed(found: Contenders, name: str) -> tuple[float | None, ...]:
    """Milliseconds of a step; and against torch.amp, for those of preamp's, the median ratio and its interval."""
    ratio = against(found, name) if name in ALIKE else {}
    return 1e3 * found[name]["stats"]["median"], *map(ratio.get, ("median", "low", "high"))


TIMES = Column("step", "ms", 2), Column("speed", "x", 2), Column("low", digits=2), Column("high", digits=2)


def rows_of(results: Mapping[str, Any], suite: str) -> Iterator[tuple[str, str, Contenders]]:
    """Work, contender, and all contenders of the work, with torch.amp's before preamp's."""
    shown = [*dict.fromkeys(ALIKE.values()), *ALIKE]
    for row in results["suites"][suite]:
        found = contenders_of(row)
        yield from ((row["name"], name, found) for name in shown if name in found)


def told_of(results: Mapping[str, Any], suite: str) -> str:
    """What figures mean, and where they are from."""
    machine, commits = results["environment"], _commits(results["suites"][suite])
    rounds = {len(each["seconds"]) for _, name, found in rows_of(results, suite) for each in [found[name]]}
    return (
        "Speed: time of torch.amp in the same dtype, a graph beside a graph, over time of this one, round by round; "
        "its median, and an interval that holds the true median with 95 % or more. "
        f"{machine['gpu']}, torch {machine['torch']}, preamp at {commits}, {rounds.pop()} rounds"
    )


def _commits(rows: Sequence[Mapping[str, Any]]) -> str:
    """At which commits rows were measured: a later one may have measured some anew."""
    found = dict.fromkeys(row[MEASURED_ON]["commit"] for row in rows)
    if len(found) == 1:
        return str(next(iter(found)))
    own = {each: [row["name"] for row in rows if row[MEASURED_ON]["commit"] == each] for each in found}
    return "; ".join(f"{each} ({', '.join(names)})" for each, names in own.items())


@committed("gpu", "./dev gpu steps")
def gpu_steps(results: dict[str, Any]) -> tuple[Table, str]:
    """Whole training steps: time and peak memory."""
    rows = [
        (work, name, *timed(found, name), peak_share(found, name) if name in ALIKE else None, found[name]["launches"])
        for work, name, found in rows_of(results, "steps")
    ]
    columns = ("network", "contender", *TIMES, Column("peak memory", "of torch.amp's", 2), Column("kernels", digits=0))
    what = "; ".join(f"{row['name']}: {row['what']}" for row in results["suites"]["steps"])
    return Table("", columns, rows), f"{what}. {told_of(results, 'steps')}"


@committed("gpu", "./dev gpu lists")
def gpu_lists(results: dict[str, Any]) -> tuple[Table, str]:
    """Adam's step with the casts around it."""
    rows = [
        (work, name, *timed(found, name), found[name]["launches"]) for work, name, found in rows_of(results, "lists")
    ]
    return Table("", ("tensors", "contender", *TIMES, Column("kernels", digits=0)), rows), told_of(results, "lists")


@committed("gpu", "./dev gpu losses")
def gpu_losses(results: dict[str, Any]) -> tuple[Table, str]:
    """Final losses beside those of float32."""
    rows = [
        (row["name"], each["name"], each["loss"], 100 * each["against fp32"], len(each["skips"]))
        for row in results["suites"]["losses"]
        for each in row["contenders"]
    ]
    columns = ("network", "contender", Column("final loss", digits=4), Column("against fp32", "%", 3), "skips")
    machine, (first, *_) = results["environment"], results["suites"]["losses"]
    return Table("", columns, rows), (
        f"Final loss: the mean of the last {TAIL} of {first['steps']} steps on synthetic data, with one seed. "
        f"{machine['gpu']}, torch {machine['torch']}, preamp at {_commits(results['suites']['losses'])}"
    )
