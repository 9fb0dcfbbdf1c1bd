"""The report of the suite: one page with pictures, made of the rows that there are, complete or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...report import BarChart, Bars, Cell, Column, Item, LineChart, Report, Section, Series, Table, smoothed
from .._race import spread
from .._results import MEASURED_ON
from ..training._contenders import O2, O5_EIGHT, REFERENCE, Contender
from ..training._parity import FP32
from ..training._rows import why_not
from ..training._works import works
from ._suite import AMP_BF16, BATCHES, NETS, NETWORKS, O1, O4, O5, TF32

LEVELS = (O1, O2, O4, O5, O5_EIGHT)
"""Of preamp, in the pictures over all networks."""

ORDER = (FP32, TF32, REFERENCE, AMP_BF16, O1, O2, O4, O5, O5_EIGHT)
"""Of all that are timed, in the pictures of a network."""


COMPILED = ", compiled"

ADVICE = (
    "Choose the level with the longest bar whose losses, below, stay with those of float32; `preamp plan` tells its "
    "memory for a model of yours. Then see on your own script whether it costs quality:"
)


@dataclass(frozen=True)
class Figure:
    """A value with the interval that holds the true median, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None


class Measured:
    """Rows, as a bench's JSON has them under the suite's name."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows
        self._by_name = {str(row["name"]): row for row in rows}

    @property
    def networks(self) -> list[str]:
        """Names of networks that there is a row of, in the order of the suite."""
        names = [work.name for work in (works("full")[network.key] for network in NETWORKS)]
        measured = [row.removesuffix(COMPILED) for row in self._by_name]
        return [name for name in names if any(row.endswith(name) for row in measured)]

    @property
    def tiny(self) -> bool:
        """Whether one of the rows is of the size that shows only that the suite works."""
        return any(row.get("size", "full") != "full" for row in self.rows)

    def row(self, name: str) -> Mapping[str, Any]:
        """A row by its name; empty if there is none."""
        return self._by_name.get(name, {})

    def contenders(self, name: str) -> list[str]:
        """Who has figures in a row, without the word that they were compiled."""
        every = self.row(name).get("contenders", ())
        return [str(each["name"]).removesuffix(COMPILED) for each in every if not each.get("error")]

    def of(self, name: str, contender: str, key: str) -> Any:
        """What was found of a contender in a row, under a key; None if nothing was."""
        for each in self.row(name).get("contenders", ()):
            if each["name"] in (contender, contender + COMPILED) and not each.get("error"):
                return each.get(key)
        return None

    def speed(self, name: str, contender: str) -> Figure | None:
        """How many times as fast as torch.amp in float16 in the same row, by rounds."""
        found = self.of(name, contender, "ratio")
        return None if found is None else Figure(found["median"], found["low"], found["high"])

    def milliseconds(self, name: str, contender: str) -> Figure | None:
        """Time of a step: the median over rounds of each round's median."""
        seconds = self.of(name, contender, "seconds")
        if not seconds:
            return None
        found = spread(seconds)
        return Figure(1e3 * found["median"], 1e3 * found["low"], 1e3 * found["high"])

    def share(self, name: str, contender: str, key: str) -> Figure | None:
        """A figure over that of torch.amp in float16."""
        own, theirs = (self.of(name, each, key) for each in (contender, REFERENCE.name))
        return Figure(own / theirs) if own and theirs else None

    def scaled(self, name: str, contender: str, key: str, unit: float) -> Figure | None:
        """A figure in a unit."""
        found = self.of(name, contender, key)
        return Figure(found / unit) if found else None

    def absent(self) -> Iterator[tuple[str, str, str]]:
        """Row, contender ("-": all of them), and why there is no figure."""
        for row in self.rows:
            name, why, short = str(row["name"]), why_not(row), row.get("cut short")
            failed = [each for each in row.get("contenders", ()) if each.get("error")]
            yield from ((name, str(each["name"]), str(each["error"])) for each in failed)
            if why or (short and not failed):
                yield name, "-", str(why or short)


def report(rows: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> Report:
    """The report of rows as a bench's JSON has them, those taken over from earlier runs included."""
    measured = Measured(rows)
    sections = [_overview(measured), _memory(measured), *(_network(measured, name) for name in measured.networks)]
    absent = list(measured.absent())
    if absent:
        table = Table("Without a figure", ("row", "contender", "why"), absent)
        sections.append(Section("What is not there", "", (table,)))
    data = []
    for row in rows:  # without samples, which are in results.json
        kept = [{k: v for k, v in each.items() if k != "samples"} for each in row.get("contenders", ())]
        data.append({**row, "contenders": kept})
    return Report(
        "preamp bench: models", verdict(measured, environment), [each for each in sections if each.items],
        picture=_picture(measured), advice=ADVICE, paste="preamp compare train.py",
        environment=environment, data={"models": data}, status="neutral",
    )  # fmt: skip


def _picture(measured: Measured) -> BarChart | None:
    """What the verdict says, network by network."""
    values = {(name, O2.name): measured.speed(name, O2.name) for name in measured.networks}
    for chart in _bars(f"Training steps of {O2.name}, eager", measured.networks, [O2.name], values, _FASTER, digits=2):
        if isinstance(chart, BarChart):
            return chart
    return None


def verdict(measured: Measured, environment: Mapping[str, Any]) -> str:
    """The one line to remember."""
    hardware = environment.get("gpu") or environment.get("cpu")
    if measured.tiny:
        return f"Tiny networks on {hardware}: the suite works; this says nothing about speed."
    found = {name: speed.value for name in measured.networks if (speed := measured.speed(name, O2.name))}
    if not found:
        return f"No training step of {O2.name} beside {REFERENCE.name} was measured on {hardware}."
    least, most = min(found, key=lambda name: found[name]), max(found, key=lambda name: found[name])
    return (
        f"On {hardware} an eager training step of {O2.name} is {found[least]:.2f} ({least}) to {found[most]:.2f} "
        f"({most}) times as fast as {REFERENCE.name}, over {len(found)} networks."
    )


# -- over all networks


def _overview(measured: Measured) -> Section:
    names = measured.networks
    commits = {str(row.get(MEASURED_ON, {}).get("commit")) for row in measured.rows}
    text = (
        f"Each ratio is the time of a training step of `{REFERENCE.name}` (torch.autocast, GradScaler, torch's fused "
        "optimizer) over that of the contender, round by round, contenders by turns; above 1 the contender is faster. "
        "A compiled contender is held against the compiled reference, and images lie channels last for all, so that "
        "neither counts for preamp.\n\nWhiskers and intervals hold the true median with 95 % or more; of fewer than "
        f"six rounds they are smallest and largest. Measured at commit {', '.join(sorted(commits))}."
    )
    if not any(measured.of(name, each, "peak bytes") for name in names for each in measured.contenders(name)):
        text += " Memory is what CUDA's allocator tells, so there is none of it here."
    charts: list[Item] = []
    for title, suffix in (("eager", ""), ("compiled", COMPILED)):
        values = {(n, c.name): measured.speed(n + suffix, c.name) for n in names for c in LEVELS}
        charts += _bars(f"Training steps, {title}", names, [c.name for c in LEVELS], values, _FASTER, digits=2)
    values = {(n, c.name): measured.share(n, c.name, "peak bytes") for n in names for c in LEVELS}
    label = f"peak over that of {REFERENCE.name}"
    charts += _bars("Peak memory, eager", names, [c.name for c in LEVELS], values, label, digits=2)
    return Section("Overview", text, charts)


_FASTER = f"times as fast as {REFERENCE.name}"


def _memory(measured: Measured) -> Section:
    """What fits: larger nets, and larger batches."""
    text = (
        "A contender gets a quarter of the device's memory, and the largest of fifteen sizes that trains two steps in "
        "it is looked for by bisection. Nets get more layers at a quarter of their batch."
    )
    items = _search(
        measured, "larger net", "layers", NETS, lambda row, each: measured.scaled(row, each, "parameters", 1e6),
        "million parameters", 0,
    )  # fmt: skip
    batches = tuple(each for each in ORDER if each in BATCHES)
    label = f"largest batch over that of {REFERENCE.name}"
    items += _search(
        measured, "largest batch", "batch", batches, lambda row, each: measured.share(row, each, "batch"), label, 2
    )
    return Section("In the same memory", text, items)


def _search(
    measured: Measured, kind: str, key: str, contenders: Sequence[Contender],
    figure: Callable[[str, str], Figure | None], label: str, digits: int,
) -> list[Item]:  # fmt: skip
    """The picture and the table of a search by every network that has one."""
    names = [name for name in measured.networks if measured.contenders(f"{kind}, {name}")]
    who = [each.name for each in contenders]
    title = f"{kind.capitalize()} in the same memory"
    values = {(name, each): figure(f"{kind}, {name}", each) for name in names for each in who}
    across, down = (names, who) if len(names) < len(who) else (who, names)  # the table is tall rather than wide
    sizes = {(name, each): _size(measured, f"{kind}, {name}", each, key) for name in names for each in who}
    rows = [(first, *(sizes.get((first, other)) or sizes.get((other, first)) for other in across)) for first in down]
    what = {"layers": "layers and parameters"}.get(key, key)
    table = Table(f"{title}: {what}", ("", *(Column(each, align="right") for each in across)), rows)
    return [*_bars(title, names, who, values, label, digits), table] if names else []


def _size(measured: Measured, row: str, contender: str, key: str) -> str | None:
    found, parameters = measured.of(row, contender, key), measured.of(row, contender, "parameters")
    if not found:
        return None if found is None else "none"
    most = "at least " if found == measured.row(row)["sizes"][-1] else ""
    return f"{most}{found}" + (f", {parameters / 1e6:,.0f} M" if parameters else "")


# -- one network

SEED = "fp32, another seed"


def _network(measured: Measured, name: str) -> Section:
    row = measured.row(name) or measured.row(name + COMPILED)
    text = f"{row['what']}; {row['parameters']:,} parameters." if row.get("parameters") else ""
    kinds = {"eager": name, "compiled": name + COMPILED}
    timed = [c.name for c in ORDER if any(c.name in measured.contenders(key) for key in kinds.values())]
    items: list[Item] = []
    times = {(each, kind): measured.milliseconds(key, each) for each in timed for kind, key in kinds.items()}
    items += _bars(f"{name}: training step", timed, [*kinds], times, "milliseconds, median of rounds")
    items += [_times(measured, name, timed)] if timed else []
    peaks = {
        (each, kind): measured.scaled(key, each, "peak bytes", 2**30) for each in timed for kind, key in kinds.items()
    }
    items += _bars(f"{name}: peak memory", timed, [*kinds], peaks, "GiB")
    return Section(name, text, [*items, *_losses(measured, name)])


def _times(measured: Measured, name: str, timed: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in timed:
        cells: list[Cell] = []
        for kind in (name, name + COMPILED):
            time, speed = measured.milliseconds(kind, each), measured.speed(kind, each)
            cells += [time.value if time else None, speed.value if speed else None]
            cells.append(f"{speed.low:.3f} to {speed.high:.3f}" if speed else None)
        rows.append((each, *cells))
    columns = [
        column for kind in ("eager", "compiled")
        for column in (Column(kind, "ms", 2), Column("ratio", "x", 3), Column("interval", align="right"))
    ]  # fmt: skip
    return Table(f"{name}: training step", ("contender", *columns), rows)


def _losses(measured: Measured, name: str) -> list[Item]:
    """Where training goes: the curves, how far they are from that of float32, and where they end."""
    row = f"losses, {name}"
    ran = [each for each in (*(c.name for c in ORDER), SEED) if each in measured.contenders(row)]
    losses = {each: measured.of(row, each, "losses") for each in ran}
    curves = {who: smoothed([math.nan if loss is None else loss for loss in own]) for who, own in losses.items()}
    if not ran:
        return []
    items: list[Item] = []
    lines = [Series(each, range(len(curve)), curve, dashed=each == SEED) for each, curve in curves.items()]
    note = "Exponential average over ten steps."
    items.append(LineChart(f"{name}: training loss", "step", "loss", lines, note=note, against=FP32.name))
    found = [[measured.of(row, each, key) for key in ("loss", "against fp32", "skips")] for each in ran]
    cells = [
        (each, loss, None if gap is None else 100 * gap, len(skips))
        for each, (loss, gap, skips) in zip(ran, found, strict=True)
    ]
    columns = ("contender", Column("final loss", digits=4), Column("against fp32", "%", 3), Column("skips", digits=0))
    notes = (f"{measured.row(row).get('what')}; the same seed and data for all but the other seed",)
    return [*items, Table(f"{name}: where training ends", columns, cells, notes)]


# -- pictures


def _bars(
    title: str, labels: Sequence[str], names: Sequence[str], values: Mapping[tuple[str, str], Figure | None],
    value_label: str, digits: int | None = None,
) -> list[Item]:  # fmt: skip
    """A chart of the figures by (label, name), without what has none; no chart if none has."""
    labels = [label for label in labels if any(values[label, name] for name in names)]
    names = [name for name in names if any(values[label, name] for label in labels)]
    series = []
    for name in names:
        figures = [values[label, name] for label in labels]
        low, high = ([getattr(f, end) if f else None for f in figures] for end in ("low", "high"))
        known = any(value is not None for value in low)
        series.append(Bars(name, [f.value if f else None for f in figures], *((low, high) if known else ())))
    return [BarChart(title, labels, series, value_label, digits=digits)] if series else []
