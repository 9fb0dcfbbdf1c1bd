"""The first screen of the doctor's report: what is shown and advised for which finding."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from preamp.cli._doctor import _show
from preamp.doctor.names import Names
from preamp.doctor.records import Rank
from preamp.doctor.tell.charts import loss_chart, picture, scale_chart
from preamp.doctor.tell.report import advice, all_findings, headline_of, verdict
from preamp.report import BarChart, Finding, LineChart, Report, Section


def rank_of(skipped: set[int], steps: int = 20, scale: float | None = 8.0) -> Rank:
    rank = Rank(0)
    for step in range(steps):
        if scale and step - 1 in skipped:
            scale /= 2
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
    assert scale_chart(rank_of(set())) is None, "nor of one that stands still"
    assert scale_chart(rank_of({4})) is not None


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


def test_the_headline_is_what_came_first() -> None:
    late, early = finding("PA103", step=50, message="late"), finding("PA201", step=3, message="early")
    whole_run = finding("PA101", step=None, severity="warning")
    assert sorted([whole_run, late, early]) == [early, late, whole_run]
    assert headline_of(sorted([late, early])).startswith("Early")


def test_what_is_said_of_several_modules_in_the_same_words_is_said_once() -> None:
    rank = rank_of(set(), steps=0)
    for step, module in ((2, "blocks.1"), (1, "blocks.0"), (3, "blocks.2")):
        rank.findings.append(finding("PA104", module=module, step=step, file="t.py", line=7, evidence="fp16"))
    rank.findings += [finding("PA104", module=name, message=f"made {name}", file="t.py", line=7) for name in "ab"]
    one, *others = all_findings([rank], Path())
    assert (one.module, one.evidence) == ("blocks.0", {"seen": "fp16", "also in": ["blocks.1", "blocks.2"]})
    assert [each.module for each in others] == ["a", "b"]


def test_a_model_keeps_its_path_when_others_come_and_go() -> None:
    names, (one, two) = Names(), (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))
    names._take({"m": one})
    names._take({"m": one, "teacher": two})
    assert (names.get(one[0]), names.get(two[0])) == ("0", "teacher:0")
    names._take({"teacher": two})
    assert names.get(two[0]) == "teacher:0"
    names._take({"teacher": one, "teacher-1": two})
    assert names.get(two[0]) == "teacher:0" != names.get(one[0]), "no two have one name"
    names._take({"inner": one[0]})
    assert names.get(one[0]) == "", "what was a part of another is none now"


def test_the_last_line_counts_the_skips() -> None:
    assert verdict((), 20, "ran to its end", "fp16", "step 0", 3).endswith(
        " 20 steps, 3 of them skipped; ran to its end."
    )


def test_information_is_short_beside_what_is_wrong() -> None:
    def shown(*findings: Finding) -> list[str]:
        console = Console(file=StringIO(), width=80)
        _show(console, "doctor", Report("t", "The verdict.", [Section("Findings", "", findings)]))
        return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]

    tensor_cores = finding("PA105", severity="info", message="misses", file="t.py", line=7, fix="# pad 10 to 16")
    both = shown(finding(), tensor_cores)
    assert "    x = 1" in both and "info PA105: misses (t.py:7)" in both and "    # pad 10 to 16" not in both
    assert "    # pad 10 to 16" in shown(tensor_cores), "in full where nothing is wrong"


def test_the_advice_begins_with_the_worst() -> None:
    several = [finding(file="t.py", line=7), finding("PA203"), finding("PA104", severity="info")]
    words, paste = advice(several, ["t.py", "--lr", "1 e"], True)
    assert words == "Begin with `PA201` in `head` at `t.py:7`, then run `preamp doctor` again. 1 error more is below."
    assert paste == "x = 1"
    assert advice([finding(fix=None)], ["t.py"], True)[1] == "preamp explain PA201"
    words, _ = advice([finding(fix=None, evidence={"tried": "9 changes: none helps"})], ["t.py"], True)
    assert "No fix can be printed: tried 9 changes: none helps." in words
    assert advice([], ["t.py", "--name", "a b"], True)[1] == "preamp compare t.py --name 'a b'"
    assert advice([], ["t.py"], False)[1] == ""
