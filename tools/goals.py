"""The goals of speed, memory and parity, judged device by device from the JSON of a bench and nothing else.

Run as `python -m tools.goals RESULTS.json` it prints them, and writes them into that file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import MEASURED_ON
from benchmarks.lists import COPY
from benchmarks.race import spread
from benchmarks.report import NOTES
from benchmarks.trainers import (
    CAPTURED,
    COMPILED,
    COMPILED_REFERENCE,
    EAGER,
    FIRST_LAYOUT,
    FOREACH,
    O2,
    O2_COMPILED,
    O2_REDUCED,
    O5_EIGHT,
    REFERENCE,
    REFERENCE_CAPTURED,
    REFERENCE_REDUCED,
    UNSCALED,
)

from preamp.report import Column, Table
from preamp.report.files import write_json

Rows = Sequence[Mapping[str, Any]]

NEVER_SLOWER = 0.98
PARITY = 0.005
"""By how much a final loss may differ from float32's, relatively, if seeds differ by less."""


DEVICES = ("H100", "H200")
"""Whose names these are in, the goals are for: ratios, which the two share."""


@dataclass(frozen=True)
class _Found:
    """A goal's figure (None: not measured) with its interval, whether it is met, and what to say besides."""

    measured: float | None
    met: bool | None
    note: str = ""
    low: float | None = None
    high: float | None = None


_ABSENT = _Found(None, None, "not measured")


class _Results:
    """Rows by suite and name."""

    def __init__(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._rows = {(suite, str(row["name"])): row for suite, row in rows}

    def suite(self, suite: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and row of every row of a suite."""
        return ((name, row) for (its, name), row in self._rows.items() if its == suite)

    def of(self, suite: str, name: str, contender: str) -> Mapping[str, Any] | None:
        """What was found of a contender, unless it failed."""
        row = self._rows.get((suite, name), {})
        return next((c for c in row.get("contenders", ()) if c["name"] == contender and not c.get("error")), None)

    def times(self, suite: str, name: str, ours: str, theirs: str = REFERENCE.name) -> dict[str, float] | None:
        """How many times faster `ours` is than `theirs`, by rounds, as `spread` has it."""
        own, other = self.of(suite, name, ours), self.of(suite, name, theirs)
        if own is None or other is None:
            return None
        return spread([b / a for a, b in zip(own["seconds"], other["seconds"], strict=True)])


def goals(suites: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Each goal, for each device that something was measured on: what it asks, target, figure, whether it is met.

    `met` is None where that is not known. `suites`: the part of a bench's JSON of that name.
    """
    by_device: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for suite, rows in suites.items():
        for row in rows:
            device = str(row.get(MEASURED_ON, {}).get("device", "an unknown device"))
            by_device.setdefault(device, []).append((suite, row))
    return [goal for device, rows in by_device.items() for goal in _on(device, rows)]


def _on(device: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    found = _Results(rows)
    unfit = "" if any(name in device for name in DEVICES) else f"there are goals for {' and '.join(DEVICES)} only"
    if any(row.get("tiny") for _, row in rows):
        unfit = "goals are for the full size"
    for goal, what, target, judge in _GOALS:
        result = judge(found)
        if unfit and result.met is not None:
            result = replace(result, met=None, note=unfit)
        yield {"goal": goal, "what": what, "device": device, "target": target, **asdict(result)}


def goals_table(judged: Sequence[Mapping[str, Any]]) -> Table:
    """The goals as they are printed."""
    said = {True: "met", False: "not met", None: "open"}
    rows = [
        (g["device"], g["goal"], g["what"], g["target"], g["measured"], g["low"], g["high"], said[g["met"]], g["note"])
        for g in judged
    ]
    figures = (Column("measured", digits=3), Column("low", digits=3), Column("high", digits=3))
    return Table("Goals", ("device", "goal", "what", "target", *figures, "", "note"), rows, NOTES[1:])


# -- judges

Judge = Callable[[_Results], _Found]

_LARGE, _BASE, _SMALL, _FF = "BERT-large b16", "BERT-base b32", "BERT-base b4", "feed-forward"
_LIST = "Adam, BERT-large"


def _at_least(target: float, found: Mapping[str, float] | None, note: str = "") -> _Found:
    if found is None:
        return _ABSENT
    return _Found(found["median"], found["median"] >= target, note, found["low"], found["high"])


def _faster(
    target: float, suite: str, name: str, contender: str = O2.name, theirs: str = REFERENCE.name, note: str = ""
) -> Judge:
    def judge(found: _Results) -> _Found:
        return _at_least(target, found.times(suite, name, contender, theirs), note)

    return judge


def _captured(target: float, name: str) -> Judge:
    """Against the reference as it is; the note has how it stands to a graph of the reference."""

    def judge(found: _Results) -> _Found:
        alike = _written(found.times("steps", name, CAPTURED.name, REFERENCE_CAPTURED.name))
        return _at_least(target, found.times("steps", name, CAPTURED.name), f"both captured: {alike}")

    return judge


def _convnet(target: float, name: str) -> Judge:
    """The better of eager and compiled, against the reference in the layout that torch starts from."""

    def judge(found: _Results) -> _Found:
        eager = found.times("steps", name, O2.name, FIRST_LAYOUT.name)
        note = f"{O2.name}; in the same layout {_written(found.times('steps', name, O2.name))}"
        layout = found.times("steps", name, REFERENCE.name, FIRST_LAYOUT.name)
        compiled = found.times("compiled", name, O2_COMPILED.name)
        if compiled is not None and layout is not None:
            note += f"; compiled x{compiled['median'] * layout['median']:.2f}"
        return _at_least(target, eager, note)

    return judge


def _memory(target: float, contender: str) -> Judge:
    def judge(found: _Results) -> _Found:
        own, theirs = found.of("steps", _LARGE, contender), found.of("steps", _LARGE, REFERENCE.name)
        if own is None or theirs is None or not theirs.get("peak bytes"):
            return _ABSENT
        share = own["peak bytes"] / theirs["peak bytes"]
        batches = [found.of("memory", _LARGE, each) for each in (contender, REFERENCE.name)]
        note = "largest batch " + " against ".join(str(b["batch"]) for b in batches if b) if all(batches) else ""
        return _Found(share, share <= target, note)

    return judge


def _waits(found: _Results) -> _Found:
    ours = {c.name for c in (*EAGER, *COMPILED) if c.ours}
    counted = {
        f"{name}, {each['name']}": each["waits"]
        for suite in ("steps", "compiled")
        for name, row in found.suite(suite)
        for each in row.get("contenders", ())
        if each["name"] in ours and each.get("waits") is not None
    }
    if not counted:
        return _ABSENT
    worst = max(counted, key=lambda name: counted[name])
    return _Found(counted[worst], counted[worst] == 0, f"of {len(counted)}; most: {worst}" if counted[worst] else "")


def _launches(found: _Results) -> _Found:
    scaled, plain = (found.of("steps", _SMALL, contender.name) for contender in (O2, UNSCALED))
    if not scaled or not plain:
        return _ABSENT
    if scaled.get("launches") is None or plain.get("launches") is None:
        return _ABSENT
    extra = scaled["launches"] - plain["launches"]
    return _Found(extra, extra <= 4)


def _slowest(found: _Results) -> _Found:
    """Ours against torch.amp of the same dtype, a graph against a graph, compiled against compiled in the same mode."""
    same = {c.name: f"torch.amp {'bf16' if c.level in ('O4', 'O5') else 'fp16'}" for c in EAGER if c.ours}
    same |= {CAPTURED.name: REFERENCE_CAPTURED.name}
    alike = {O2_COMPILED.name: COMPILED_REFERENCE.name, O2_REDUCED.name: REFERENCE_REDUCED.name}
    pairs = [("steps", name, ours, theirs) for name, _ in found.suite("steps") for ours, theirs in same.items()]
    pairs += [("compiled", name, ours, theirs) for name, _ in found.suite("compiled") for ours, theirs in alike.items()]
    ratios = {(name, ours): found.times(suite, name, ours, theirs) for suite, name, ours, theirs in pairs}
    known = {pair: value for pair, value in ratios.items() if value is not None}
    if not known:
        return _ABSENT
    worst = min(known, key=lambda pair: known[pair]["median"])
    slow = sum(value["median"] < NEVER_SLOWER for value in known.values())
    note = f"{slow} of {len(known)} below; least: {', '.join(worst)}"
    return replace(_at_least(NEVER_SLOWER, known[worst], note), met=not slow)


def _parity(found: _Results) -> _Found:
    worst, broken, seen = 0.0, [], 0
    for name, row in found.suite("losses"):
        by_name = {c["name"]: c for c in row.get("contenders", ()) if not c.get("error")}
        if "fp32" not in by_name:
            continue
        band = abs((by_name.get("fp32, another seed") or {}).get("against fp32") or 0.0)
        allowed = _late(by_name[REFERENCE.name], row) if REFERENCE.name in by_name else 0
        for each in by_name.values():
            if not each["name"].startswith("preamp"):
                continue
            seen += 1
            gap = abs(each["against fp32"]) if each["against fp32"] is not None else float("inf")
            worst = max(worst, gap)
            if gap > max(PARITY, band) or _late(each, row) > allowed:
                broken.append(f"{name}, {each['name']}")
    return _ABSENT if not seen else _Found(worst, not broken, "; ".join(broken) or f"{seen} runs")


def _late(each: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    return sum(index >= row["settled after"] for index in each["skips"])


def _written(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"x{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


_CLIPPED = f"{_LIST}, clipping"

_GOALS: tuple[tuple[str, str, str, Judge], ...] = (
    ("G1", "optimizer and casts, BERT-large", ">= 1.6x", _faster(1.6, "lists", _LIST)),
    ("G1", "the same with clipping", ">= 1.8x", _faster(1.8, "lists", _CLIPPED)),
    ("G1b", "the same, against foreach", ">= 2.7x", _faster(2.7, "lists", _LIST, theirs=FOREACH.name)),
    ("G1c", "share of copy bandwidth", ">= 0.90", _faster(0.9, "lists", _LIST, theirs=COPY)),
    ("G2", "8-bit states", ">= 2.3x", _faster(2.3, "lists", _LIST, O5_EIGHT.name)),
    ("G3", "step, BERT-base b32", ">= 1.15x", _faster(1.15, "steps", _BASE)),
    ("G3", "step, BERT-large", ">= 1.12x", _faster(1.12, "steps", _LARGE)),
    ("G3b", "compiled against eager, BERT-base b32", ">= 1.35x",
     _faster(1.35, "compiled", _BASE, O2_COMPILED.name)),
    ("G3b", "compiled against eager, BERT-large", ">= 1.25x",
     _faster(1.25, "compiled", _LARGE, O2_COMPILED.name)),
    ("G3c", "compiled against compiled, BERT-base b32", ">= 1.05x",
     _faster(1.05, "compiled", _BASE, O2_COMPILED.name, COMPILED_REFERENCE.name)),
    ("G3c", "compiled against compiled, BERT-large", ">= 1.05x",
     _faster(1.05, "compiled", _LARGE, O2_COMPILED.name, COMPILED_REFERENCE.name)),
    ("G4", "captured step, feed-forward", ">= 3x", _captured(3.0, _FF)),
    ("G4", "captured step, BERT-base b4", ">= 3x", _captured(3.0, _SMALL)),
    ("G5", "UNet against NCHW", ">= 1.5x", _convnet(1.5, "UNet")),
    ("G5", "ResNet-50 against NCHW", ">= 1.4x", _convnet(1.4, "ResNet-50")),
    ("G7", "peak memory, BERT-large, O2", "<= 0.80", _memory(0.80, O2.name)),
    ("G7", "peak memory, BERT-large, split masters and 8-bit states", "<= 0.70", _memory(0.70, O5_EIGHT.name)),
    ("G8", "waits a step, most of any of preamp's", "0", _waits),
    ("G8", "kernels that scaling adds to a step", "<= 4", _launches),
    ("G9", "never slower than torch.amp alike, least ratio", ">= 0.98x", _slowest),
    ("G10", "final loss against fp32, largest gap", "<= 0.5 % or as seeds", _parity),
)  # fmt: skip


def main(path: Path) -> None:
    """Judge the results of a bench, print the goals, and write them into the file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["goals"] = goals(content["suites"])
    write_json(path, content)
    print(goals_table(content["goals"]).to_text())


if __name__ == "__main__":
    main(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
