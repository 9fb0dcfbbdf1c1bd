"""The first screen of the doctor's report: what is shown and advised for which finding."""

from __future__ import annotations

from typing import Any

import pytest

from preamp.doctor.records import Rank
from preamp.doctor.tell.charts import loss_chart, picture, scale_chart
from preamp.doctor.tell.report import advice, headline_of
from preamp.report import BarChart, Finding, LineChart


def rank_of(skipped: set[int], steps: int = 20, scale: float | None = 8.0) -> Rank:
    rank = Rank(0)
    for step in range(steps):
        rank.write("step", {"step": step, "loss": 1.0, "scale": scale, "skipped": step in skipped})
    return rank


def finding(code: str = "PA201", **changes: Any) -> Finding:
    values: dict[str, Any] = {"severity": "error", "message": "made inf", "module": "head", "step": 3, "fix": "x = 1"}
    return Finding(code, **{**values, **changes})


def test_skips_are_rules_and_rows_of_them_are_shades() -> None:
    chart = loss_chart(rank_of({2, 5, 6, 7, 10, 11, 15}))
    assert [(mark.x, mark.label) for mark in chart.markers] == [(2, "skipped"), (15, "")]
    assert [(span.start, span.end, span.label) for span in chart.spans] == [
        (5, 8, "3 steps skipped in a row"), (10, 12, "")
    ]  # fmt: skip


def test_of_many_skips_the_longest_rows_are_marked() -> None:
    chart = loss_chart(rank_of({*range(0, 400, 3), 301, 302}, steps=400))
    assert len(chart.markers) + len(chart.spans) == 40
    assert [(span.start, span.end) for span in chart.spans] == [(300, 304)]


def test_the_picture_is_the_one_that_shows_the_finding() -> None:
    rank = rank_of({4, 5})
    assert picture(rank, finding("PA201")).title == "Loss scale"
    assert picture(rank, None).title == "Loss"
    assert picture(rank_of({4}, scale=None), finding("PA201")).title == "Loss"
    assert picture(rank_of(set()), finding("PA201")).title == "Loss", "nothing was skipped: the scale stands still"
    chart = picture(rank, finding("PA206", step=9))
    assert isinstance(chart, LineChart) and [mark.x for mark in chart.markers] == [9]
    assert picture(rank, finding("PA202")).title == "Loss", "no magnitudes were seen"
    rank.write("underflow", {"step": 2, "scale": 1, "rows": [{"name": f"w{at}", "lost": 0.5} for at in range(12)]})
    lost = picture(rank, finding("PA202"))
    assert isinstance(lost, BarChart) and lost.labels[0] == "w0" and len(lost.labels) == 10
    assert lost.note == "2 more parameters lost less." and lost.series[0].values[0] == 50


def test_without_a_scale_there_is_no_chart_of_it() -> None:
    assert scale_chart(rank_of(set(), scale=None)) is None


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        ("the loss is inf", "The loss is inf (PA201 in head)."),
        ("aten.bmm in module 'head' made inf", "aten.bmm in module 'head' made inf (PA201)."),
    ],
)
def test_the_headline_is_the_worst_finding(message: str, headline: str) -> None:
    assert headline_of([finding(message=message), finding("PA202")]) == headline
    assert headline_of([finding(severity="info")]) == headline_of([]) == ""


def test_the_advice_begins_with_the_worst() -> None:
    several = [finding(file="t.py", line=7), finding("PA203"), finding("PA104", severity="info")]
    words, paste = advice(several, ["t.py", "--lr", "1 e"], True)
    assert words == "Begin with `PA201` in `head` at `t.py:7`, then run `preamp doctor` again. 1 error more is below."
    assert paste == "x = 1"
    assert advice([finding(fix=None)], ["t.py"], True)[1] == "preamp explain PA201"
    assert advice([], ["t.py", "--name", "a b"], True)[1] == "preamp compare t.py --name 'a b'"
    assert advice([], ["t.py"], False)[1] == ""
