"""The pages that people look at: what every one has for the eye, the keyboard and the ear, and how large it gets."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.report import report
from tests.report.tree import Element, Tree
from torch import nn

from preamp.demo import Trial, make_plan
from preamp.demo import build as build_demo
from preamp.demo._run import Results
from preamp.doctor import watch
from preamp.doctor.tell.comparison import Ran, build_comparison
from preamp.report import Finding, LineChart, Report, Section, Series, Table
from preamp.report.numbers import ROWS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def trained(steps: int = 6) -> Any:
    """A watch of a small model that float16 underflows in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
    with watch(model, every=2) as watched:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y) * 1e-6
            loss.backward()
            optimizer.step()
    return watched


def compared(steps: int = 50) -> Report:
    """A comparison of runs that hardly differ."""
    draw = random.Random(1)
    runs = []
    for seed in range(4):
        full = [1 + math.exp(-step / 5) + draw.gauss(0, 0.01) for step in range(steps)]
        mixed = [loss + draw.gauss(0, 0.001) for loss in full]
        runs += [Ran(f"{of}-{seed}", of == "full", seed, 0, 1.0, losses, 0) for of, losses in
                 (("mixed", mixed), ("full", full))]  # fmt: skip
    return build_comparison(runs, None, ["train.py"])[0]


def shown() -> Report:
    """A demo of one network at two levels."""
    results = Results(plan=make_plan(["flights"], "O0,O4", "ci", False, 3, "cpu"), environment={"torch": "2"})
    for level in ("O0", "O4"):
        for seed in range(3):
            losses = [2 / (step + 1) + 0.01 * seed for step in range(30)]
            results.trials.append(
                Trial(task="flights", level=level, seed=seed, steps=30, batch_size=2, parameters=3, losses=losses,
                      scales=[1.0] * 30, step_ms=[1.0] * 30, quality=0.7 + seed / 100, dtypes={"fp32": 1},
                      complete=True)
            )  # fmt: skip
    return build_demo(results)


def measured() -> Report:
    content = json.loads(next(RESULTS.glob("step_*.json")).read_text())
    return report(content["suites"], content["environment"])


PAGES: dict[str, Callable[[], Report]] = {
    "doctor": lambda: trained().report(), "compare": compared, "demo": shown, "bench": measured
}  # fmt: skip


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> Element:
    return Tree(PAGES[request.param]().to_html()).root


def test_the_first_screen_has_verdict_picture_and_what_to_do(page: Element) -> None:
    (main,) = page.all("main")
    verdict, first, *_ = main.children
    assert "verdict" in verdict.classes and verdict.text
    assert "first" in first.classes
    assert [child for child in first.all("figure") if "chart" in child.classes]
    (advice,) = first.all("section")
    assert "advice" in advice.classes and advice.all("p") and advice.all("pre")


def test_the_first_picture_leaves_room_on_a_phone(page: Element) -> None:
    """Of 400 x 800 pixels; the title, the verdict and what to do take half."""
    first = next(each for each in page.all("div") if "first" in each.classes)
    drawing = next(each for each in first.all("svg") if "narrow" in each.classes)
    assert float(drawing.attributes["viewbox"].split()[3]) <= 380


def test_every_chart_has_its_numbers_in_a_table(page: Element) -> None:
    charts = [figure for figure in page.all("figure") if "chart" in figure.classes]
    assert charts
    for chart in charts:
        (details,) = chart.all("details")
        (summary,) = details.all("summary")
        assert summary.text == "The numbers of this chart"
        (table,) = details.all("table")
        assert len(table.all("caption")) == 1
        assert table.all("caption")[0].text
        heads, rows = table.all("thead")[0].all("th"), table.all("tbody")[0].all("tr")
        assert rows and len(rows) <= ROWS
        assert {head.attributes["scope"] for head in heads} == {"col"}
        assert all(len(row.children) == len(heads) for row in rows)
        assert all(row.children[0].attributes.get("scope") == "row" for row in rows)


def test_every_drawing_is_named_and_described(page: Element) -> None:
    for drawing in page.all("svg"):
        assert drawing.attributes["role"] == "img"
        assert drawing.attributes["aria-label"]
        assert [child.tag for child in drawing.children[:2]] == ["title", "desc"]
        assert all(child.text for child in drawing.children[:2])
    screens = Counter(drawing.attributes["class"] for drawing in page.all("svg"))
    assert screens["wide"] == screens["narrow"] > 0


def test_keyboard_and_screen_reader_reach_everything(page: Element) -> None:
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    ids = [element.attributes["id"] for element in page.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    targets = [link.attributes["href"].removeprefix("#") for link in page.all("a")]
    labels = [e.attributes["aria-labelledby"] for e in page.all() if "aria-labelledby" in e.attributes]
    assert set(targets + labels) <= set(ids)
    (body,) = page.all("body")
    assert body.children[0].tag == "a" and "skip" in body.children[0].classes
    for tag in ("header", "main", "footer", "h1"):
        assert len(page.all(tag)) == 1, tag
    levels = [int(heading.tag[1]) for heading in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    scrolled = [e for e in page.all() if "scroll" in e.classes or "paste" in e.classes]
    assert scrolled
    for element in scrolled:
        assert element.attributes["tabindex"] == "0"
        assert element.attributes["role"] == "region" and element.attributes["aria-label"]
    assert all(table.parent is not None and "scroll" in table.parent.classes for table in page.all("table"))


def test_lines_that_lie_on_each_other_say_so() -> None:
    chart = LineChart(
        "Loss", "step", "loss", against="full",
        series=[Series("mixed", [0, 1, 2], [3.0, 2.0, 1.5]), Series("full", [0, 1, 2], [3.0, 2.0, 1.0]),
                Series("far", [0, 1, 2], [9.0, 9.0, 9.0])],
    )  # fmt: skip
    page = Tree(Report("t", "v", [Section("s", "", [chart])]).to_html()).root
    notes = [p.text for p in page.all("p") if "note" in p.classes]
    assert notes == [
        "Lines that mostly lie on each other: mixed and full; the largest difference from full is 0.5, at step 2."
    ]
    titles = [caption.text for caption in page.all("figcaption")]
    assert titles == ["Loss", "Difference from full"]
    rows = [[cell.text for cell in row.children] for row in page.all("table")[1].all("tbody")[0].all("tr")]
    assert rows == [["0", "0", "0", "6"], ["1", "0", "-", "7"], ["2", "0.5", "0", "8"]]


@pytest.mark.parametrize(
    ("a", "b", "note"),
    [
        ([1, 2, 3], [1, 2, 3], "Lines that are the same: a and b."),
        ([1, 2, 3], [1, 2, 3.01], "Lines that lie on each other: a and b; the largest difference is 0.01, at step 2."),
        ([1, 2, 3], [3, 2, 1], None),
        ([1, 2, 3], [None, None, None], None),
    ],
)
def test_what_is_said_of_two_lines(a: list[float], b: list[float], note: str | None) -> None:
    chart = LineChart("t", "step", "y", [Series("a", range(3), a), Series("b", range(3), b)])
    page = Tree(Report("t", "v", [Section("s", "", [chart])]).to_html()).root
    assert [p.text for p in page.all("p") if "note" in p.classes] == ([note] if note else [])
    assert len(page.all("figure")) == 1


def test_no_spike_is_lost_in_the_table_of_a_long_curve() -> None:
    values = [1.0] * 20_000
    values[7_777], values[15_000] = 50.0, math.nan
    chart = LineChart("Loss", "step", "loss", [Series("loss", range(20_000), values)])
    page = Tree(Report("t", "v", [Section("s", "", [chart])]).to_html()).root
    rows = [[cell.text for cell in row.children] for row in page.all("tbody")[0].all("tr")]
    assert len(rows) == 50
    assert [row for row in rows if row[1] != "1"] == [["7600 to 7999", "1 to 50"]]


@pytest.mark.slow
def test_a_long_run_of_many_modules_stays_small() -> None:
    """20,000 steps, 300 modules, 300 findings: what was recorded of real steps, repeated."""
    watched = trained()
    rank = watched._kept
    steps, samples = list(rank.steps), list(rank.many["telemetry"])
    draw = random.Random(0)
    rank.steps[:] = [
        {**steps[at % len(steps)], "step": at, "loss": 2 * math.exp(-at / 4000) + draw.random() / 10, "scale": 1024.0,
         "skipped": at % 997 == 0}
        for at in range(20_000)
    ]  # fmt: skip
    rows = [{**row, "module": f"blocks.{block}.{row['module']}"} for block in range(150) for row in samples[0]["rows"]]
    rank.many["telemetry"] = [{**samples[0], "step": at, "rows": rows} for at in range(0, 20_000, 1000)]
    rank.facts["audit"]["outputs"] = {f"blocks.{at}": {"fp16": at} for at in range(300)}
    rank.findings[:] = [
        Finding("PA104", "warning", f"block {at} is sick", f"blocks.{at}", step=at, fix="mend it") for at in range(300)
    ]
    report, content = watched._build()
    page = report.to_html()
    assert len(page.encode()) < 3_000_000
    assert len(json.dumps(content)) > 1_000_000, "it is in report.json"
    assert "report-data" not in page and "in the JSON file beside it" in page
    tree = Tree(page).root
    assert len([e for e in tree.all("article") if "finding" in e.classes]) == 40
    assert "blocks.99 " in page or ">blocks.99<" in page
    assert max(len(table.all("tr")) for table in tree.all("table")) <= 101
    paths = [path.attributes["d"] for path in tree.all("path") if "line" in path.classes]
    assert max(map(len, paths)) < 20_000


def test_of_a_long_table_the_first_rows_are_shown_and_the_rest_is_counted() -> None:
    rows = [(f"module {at}", at) for at in range(1000)]
    report = Report("t", "v", [Section("s", "", [Table("Modules", ("module", "n"), rows)])])
    page = Tree(report.to_html()).root
    assert len(page.all("tbody")[0].all("tr")) == 100
    assert "900 more rows are in the JSON file." in [p.text for p in page.all("p")]
    assert len(report.to_dict()["sections"][0]["items"][0]["rows"]) == 1000


# -- colours


def variables() -> dict[str, dict[str, str]]:
    """The colours of the style sheets, light and dark."""
    css = "".join(files("preamp.report").joinpath(name).read_text() for name in ("chart.css", "style.css"))
    found: dict[str, dict[str, str]] = {"light": {}, "dark": {}}
    for query, block in re.findall(r"(@media[^{]*\{\s*)?:root \{(.*?)\}", css, flags=re.S):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for scheme in ("dark",) if query else ("light", "dark"):
            found[scheme] |= colours
    return found


def mixed(colour: str, share: float, paper: str) -> str:
    """So much of a colour over another one."""
    parts = zip(*([int(text[i : i + 2], 16) for i in (1, 3, 5)] for text in (colour, paper)), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


def contrast(a: str, b: str) -> float:
    """WCAG 2.2's ratio of two colours' luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_what_wcag_says_it_is() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_can_be_told_from_their_paper(scheme: str) -> None:
    of = variables()[scheme]
    texts = [(ink, paper) for ink in ("ink", "soft", "link") for paper in ("page", "card", "sunk")]
    texts += [(tone, "card") for tone in ("error", "warning", "info")]
    texts += [(ink, "chart-paper") for ink in ("chart-ink", "chart-soft")]
    pairs = {f"{ink} on {paper}": (of[ink], of[paper], 4.5) for ink, paper in texts}
    for tone in ("good", "error", "warning", "info", "neutral"):
        for verdict in ("good", "error", "warning", "neutral"):
            paper = mixed(of[verdict], 0.07, of["card"])
            pairs[f"ink on the verdict {verdict}"] = (of["ink"], paper, 4.5)
            pairs[f"pill {tone} on the verdict {verdict}"] = (of[tone], paper, 4.5)
    pairs["number in a heat map"] = (of["chart-ink"], mixed(of["series-1"], 0.55, of["chart-paper"]), 4.5)
    pairs |= {f"series {at}": (of[f"series-{at}"], of["chart-paper"], 3.0) for at in range(8)}
    pairs |= {f"focus on {paper}": (of["link"], of[paper], 3.0) for paper in ("page", "card")}
    poor = {name: round(contrast(a, b), 2) for name, (a, b, least) in pairs.items() if contrast(a, b) < least}
    assert not poor
