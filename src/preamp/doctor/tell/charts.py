"""The pictures of a report: loss and scale over the steps, which layer's values lie where, which scales would do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format
from ...report import (
    BarChart,
    Bars,
    ExponentHistogram,
    Finding,
    HeatMap,
    Item,
    LineChart,
    Marker,
    Section,
    Series,
    Span,
    exponent_spans,
)
from ..exponents import KINDS, Exponents, Row, rows_of
from ..records import Rank

ROWS = 40
"""Modules shown in a heat map; the least harmful ones of more are left out."""
FIRST = 10
"""Those shown on the first screen."""
SAMPLES = 12
"""Observed steps kept in the JSON."""
MARKS = 40
"""So many skips, or rows of them, are marked at most: the longest."""
IN_SCALE = frozenset({"PA201", "PA203", "PA207"})
"""What the loss scale shows best: a bad step is skipped, and the scale falls."""
BELOW = frozenset({"PA107", "PA111", "PA202"})
"""What is lost below float16's normal range."""
BEYOND = frozenset({"PA103", "PA205"})
"""What comes near the end of the range."""


def loss_chart(rank: Rank, worst: Finding | None = None) -> LineChart:
    """The loss of every attempt to step; skipped ones are marked, and the step of the worst finding."""
    loss, marks, spans = _over_steps(rank, "loss")
    if worst is not None and worst.step is not None and not any(mark.x == worst.step for mark in marks):
        marks.append(Marker(float(worst.step), None, worst.code))
    return LineChart("Loss", "step", "loss", (loss,), markers=marks, spans=spans)


def scale_chart(rank: Rank) -> LineChart | None:
    """The loss scale, if there is one that changes."""
    if len({step["scale"] for step in rank.steps}) < 2:
        return None
    scale, marks, spans = _over_steps(rank, "scale", steps=True)
    return LineChart("Loss scale", "step", "scale", (scale,), y_log2=True, markers=marks, spans=spans)


def _over_steps(rank: Rank, name: str, **options: Any) -> tuple[Series, list[Marker], list[Span]]:
    """A number of every attempt to step, with what marks those that were skipped."""
    values = [step[name] if isinstance(step[name], (int, float)) else None for step in rank.steps]
    series = Series(name, [step["step"] for step in rank.steps], values, **options)
    return series, *marked((step["step"] for step in rank.steps if step["skipped"]), "skipped")


def picture(rank: Rank, worst: Finding | None) -> LineChart | BarChart | HeatMap:
    """What shows the worst finding; the loss where nothing shows it better."""
    code = worst.code if worst is not None else ""
    if code in IN_SCALE and any(step["skipped"] for step in rank.steps):
        return scale_chart(rank) or loss_chart(rank, worst)
    if code == "PA202" and (lost := lost_gradients(rank.facts.get("underflow"))) is not None:
        return lost
    maps = heat_maps(rank) if code in BELOW | BEYOND else None
    if maps is None:
        return loss_chart(rank, worst)
    return maps[0] if code in BELOW else maps[1]


def spread(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For `report.json`: a few of the observed steps, the first and the last among them."""
    chosen = samples
    if len(samples) > SAMPLES:
        chosen = [samples[round(i * (len(samples) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
    return [
        {"step": one["step"], "scale": one["backward_scale"], "rows": [row.to_dict() for row in rows_of(one)]}
        for one in chosen
    ]


def magnitudes(samples: Sequence[Mapping[str, Any]], has_fp16: bool) -> Section | None:
    """Heat maps over modules, and histograms over all."""
    if not samples:
        return None
    by_step = {one["step"]: rows_of(one) for one in samples}
    rows = [row for many in by_step.values() for row in many]
    if not rows:
        return None
    last = max(by_step)
    items: list[Item] = [_below(rows, has_fp16), _headroom(rows), _histogram(by_step[last], last)]
    text = (
        f"Seen in {len(by_step)} step{'s' if len(by_step) > 1 else ''} ({min(by_step)} to {last}). float16 holds "
        "magnitudes from 6.1e-5 to 65504 in full; below that it loses bits, and below 3e-8 it is zero. Gradients are "
        "judged with the loss scale that was on them."
    )
    if not has_fp16:
        text += " Nothing here ran in float16: this is what it would meet."
    return Section("Magnitudes by layer", text, items)


def ran_fp16(rank: Rank) -> bool:
    """Whether something of a process computed in float16, as far as was seen."""
    return "float16" in rank.facts.get("audit", {}).get("low", ())


def heat_maps(rank: Rank, most: int = FIRST) -> tuple[HeatMap, HeatMap] | None:
    """The worst modules of a process: what lies below float16's full precision, and the room below its largest."""
    rows = [row for one in rank.many.get("telemetry", []) for row in rows_of(one)]
    return (_below(rows, ran_fp16(rank), most), _headroom(rows, most)) if rows else None


def lost_gradients(record: Mapping[str, Any] | None) -> BarChart | None:
    """The parameters that lost most of their gradients to float16; None where that was not measured."""
    if not record or not record["rows"]:
        return None
    worst = record["rows"][:FIRST]
    lost = Bars("flushed to zero", [100 * row["lost"] for row in worst])
    left = len(record["rows"]) - len(worst)
    return BarChart(
        f"Gradients that float16 made zero, step {record['step']}", [row["name"] for row in worst], [lost],
        "% of the values that are not zero in float32", digits=1,
        note=f"{left} more parameters lost less." if left else "",
    )  # fmt: skip


def _worst(rows: Iterable[Row], value: Any, worse: Any) -> dict[str, dict[str, float]]:
    """The worst over the steps, by module and kind."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        new = value(row)
        if new is None:
            continue
        kinds = found.setdefault(row.module, {})
        kinds[row.kind] = worse(kinds[row.kind], new) if row.kind in kinds else new
    return found


def _heat(title: str, worst: dict[str, dict[str, float]], label: str, harm: Any, most: int, **options: Any) -> HeatMap:
    ranked = sorted(worst, key=lambda module: max(map(harm, worst[module].values())), reverse=True)[:most]
    modules = [module for module in worst if module in ranked]
    note = f"{len(worst) - len(ranked)} more modules are better off." if len(worst) > len(ranked) else ""
    values = [[worst[module].get(kind) for kind in KINDS] for module in modules]
    return HeatMap(title, [m or "(root)" for m in modules], KINDS, values, label, note=note, **options)


def _below(rows: list[Row], has_fp16: bool, most: int = ROWS) -> HeatMap:
    title = "Below float16's full precision" + ("" if has_fp16 else ", if it were used")
    worst = _worst(rows, lambda row: row.in_backward.below(FP16.smallest_normal), max)
    return _heat(title, worst, "share of non-zero values under 2^-14, the worst step", float, most, percent=True)


def _headroom(rows: list[Row], most: int = ROWS) -> HeatMap:
    worst = _worst(rows, lambda row: row.in_backward.headroom(FP16), min)
    label = "powers of two below 65504, the worst step; negative is infinite in float16"
    return _heat("Headroom", worst, label, lambda bits: -bits, most, pale=16.0, dark=0.0, digits=1)


def _histogram(rows: list[Row], step: int) -> ExponentHistogram:
    series = []
    for kind in KINDS:
        whole = sum((row.true for row in rows if row.kind == kind), start=Exponents(0, ()))
        if whole.some:
            shares = [count / whole.some for count in whole.counts]
            series.append(Series(kind, range(whole.first, whole.first + len(shares)), shares))
    spans = [*_spans(BF16)[1:], *_spans(FP16), *_spans(FP8_E5M2)[1:], *_spans(FP8_E4M3)[1:]]
    note = "Gradients without the loss scale. bfloat16 and float32 reach from 2^-126 to 2^127."
    return ExponentHistogram(f"Where the magnitudes lie, step {step}", series, spans=spans, note=note)


def _spans(held: Format) -> tuple[Span, Span]:
    return exponent_spans(
        held.name, smallest_subnormal=held.smallest_subnormal, smallest_normal=held.smallest_normal, largest=held.max
    )


def marked(steps: Iterable[int], what: str) -> tuple[list[Marker], list[Span]]:
    """A rule for each of these steps, and a shade for several in a row; the first and the longest say what."""
    rows: list[list[float]] = []
    for at in map(float, steps):
        if rows and at == rows[-1][-1] + 1:
            rows[-1].append(at)
        else:
            rows.append([at])
    rows = sorted(sorted(rows, key=len, reverse=True)[:MARKS])
    longest = max(rows, key=len, default=None)
    alone, several = ([row for row in rows if (len(row) > 1) is many] for many in (False, True))
    marks = [Marker(row[0], None, what if row is alone[0] else "") for row in alone]
    words = {id(longest): f"{len(longest)} steps {what} in a row" if longest else ""}
    return marks, [Span(row[0], row[-1] + 1, words.get(id(row), "")) for row in several]
