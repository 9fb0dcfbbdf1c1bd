import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preamp.report import (
    BarChart,
    Bars,
    ExponentHistogram,
    HeatMap,
    LineChart,
    Marker,
    Series,
    Span,
    exponent_spans,
)
from preamp.report.svg import runs, thin, to_svg

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ACROSS, DOWN = ("x", "x1", "x2", "cx"), ("y", "y1", "y2", "cy")


def check(chart, width=760):
    """Parse the drawing; every coordinate is finite and inside the view box. Returns the root.

    And the chart can be told as text and as strict JSON.
    """
    assert isinstance(chart.to_text(), str)
    json.dumps(chart.to_dict(), allow_nan=False)
    text = to_svg(chart, width)
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<(title|desc|text)\b.*?</\1>", "", text, flags=re.S))
    root = ET.fromstring(text)
    _, _, wide, tall = map(float, root.get("viewBox").split())
    for node in root.iter():
        for names, limit in ((ACROSS, wide), (DOWN, tall)):
            for name in names:
                if node.get(name) is not None:
                    value = float(node.get(name))
                    assert 0 <= value <= limit, (node.tag, node.attrib)
        for start, size, limit in (("x", "width", wide), ("y", "height", tall)):
            if node.get(size) is not None:
                assert float(node.get(size)) >= 0
                assert float(node.get(start)) + float(node.get(size)) <= limit + 0.2, node.attrib
        numbers = [float(found) for found in NUMBER.findall(node.get("d", ""))]
        assert all(0 <= value <= wide for value in numbers[::2])
        assert all(0 <= value <= tall for value in numbers[1::2])
    return root


def paths(root, style):
    return [node.get("d") for node in root.iter() if style in node.get("class", "").split() and node.get("d")]


any_float = st.floats() | st.none() | st.sampled_from([0.0, 5e-324, 1.7e308, -1.7e308, 1e-310, 65504.0])


@st.composite
def any_series(draw):
    size = draw(st.integers(0, 12))
    column = st.lists(any_float, min_size=size, max_size=size)
    band = (draw(column), draw(column)) if draw(st.booleans()) else (None, None)
    name = draw(st.text(max_size=8))
    return Series(name, draw(column), draw(column), *band, dashed=draw(st.booleans()), steps=draw(st.booleans()))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    series=st.lists(any_series(), max_size=3),
    scale=st.sampled_from([{}, {"x_log": True}, {"y_log2": True}, {"x_log": True, "y_log2": True}]),
    markers=st.lists(st.builds(Marker, st.floats(), any_float, st.text(max_size=30)), max_size=4),
    spans=st.lists(st.builds(Span, any_float, any_float, st.text(max_size=12)), max_size=4),
    text=st.text(max_size=120),
    width=st.sampled_from([390, 760]),
)  # fmt: skip
def test_any_line_chart_is_a_sound_drawing(series, scale, markers, spans, text, width):
    check(LineChart(text, text, text, series, markers=markers, spans=spans, **scale), width)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(series=st.lists(any_series(), max_size=3), width=st.sampled_from([390, 760]))
def test_any_histogram_is_a_sound_drawing(series, width):
    spans = exponent_spans("fp16", smallest_subnormal=2**-24, smallest_normal=2**-14, largest=65504)
    check(ExponentHistogram("h", series, spans=spans), width)


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.tuples(any_float, any_float), max_size=4),
    base=st.sampled_from([0.0, 1.0]),
    digits=st.none() | st.integers(0, 3),
    name=st.text(max_size=80),
    width=st.sampled_from([390, 760]),
)
def test_any_bar_chart_is_a_sound_drawing(values, base, digits, name, width):
    first, second = [a for a, _ in values], [b for _, b in values]
    series = (Bars(name, first, first, second), Bars("b", second))
    chart = BarChart("b", [name] * len(values), series, name, base=base, digits=digits)
    check(chart, width)


def test_bars_of_ratios_begin_at_one_under_their_whole_names():
    name = "Adam, BERT-base: Session with preamp.optim and masters that are split"
    chart = BarChart("b", [name, "short"], [Bars("ratio", [0.5, 2.0])], "times", base=1.0)
    root = check(chart, 760)
    slow, fast = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if "bar" in str(e.get("class"))]
    assert float(slow.get("x")) + float(slow.get("width")) == pytest.approx(float(fast.get("x")), abs=0.2)
    assert name in [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.tuples(any_float, any_float), max_size=4),
    percent=st.booleans(),
    name=st.text(max_size=80),
    width=st.sampled_from([390, 760]),
)
def test_any_heat_map_is_a_sound_drawing(values, percent, name, width):
    chart = HeatMap("h", [name] * len(values), [name, "b"], values, name, pale=16, dark=0, percent=percent)
    root = check(chart, width)
    written = [e for e in root.iter("{http://www.w3.org/2000/svg}text") if e.get("class") == "cell"]
    assert len(written) == 2 * len(values)
    assert name.split() == [] or name in chart.to_text() or not values


def test_a_heat_map_is_darkest_at_its_dark_end():
    chart = HeatMap("h", ["a"], ["x", "y", "z"], [[16, 4, None]], "bits", pale=16, dark=0)
    shades = [float(e.get("fill-opacity")) for e in check(chart).iter() if e.get("class") == "heat"]
    assert len(shades) == 2
    assert shades[0] < shades[1] < 0.6
    assert [chart.cell(v) for v in (16, None)] == ["16", "-"]
    share = HeatMap("h", [], [], [], "share", percent=True)
    assert [share.cell(v) for v in (0, 1e-5, 0.0312, 0.312, 1)] == ["0%", "<0.1%", "3.1%", "31%", "100%"]


def test_gaps_stay_open():
    nan = math.nan
    chart = LineChart("t", "x", "y", [Series("s", range(8), [1, 2, nan, 3, math.inf, 4, 5, None])])
    root = check(chart)
    assert paths(root, "line")[-1].count("M") == 2
    assert len(paths(root, "dot")) == 1


def test_what_is_not_positive_is_a_gap_on_a_log_axis():
    chart = LineChart("t", "x", "y", [Series("s", [0, 1, 10, 100, 1000], [1, -1, 2, 0, 4])], x_log=True, y_log2=True)
    root = check(chart)
    assert not [d for d in paths(root, "line") if d.count("L") > 1]
    assert paths(root, "dot")[0].count("M") == 2


def test_a_band_below_zero_reaches_the_bottom_of_a_log_axis():
    chart = LineChart("t", "x", "y", [Series("s", [0, 1, 2], [1, 1, 1], [0.5, -1, 0.5], [2, 2, 2])], y_log2=True)
    assert paths(check(chart), "band")[0].count("L") == 5


def test_steps_hold_their_value():
    root = check(LineChart("t", "x", "y", [Series("s", [0, 1], [1, 2], steps=True)], y_log2=True))
    (start, corner, end) = re.findall(r"[ML]([\d.]+) ([\d.]+)", paths(root, "line")[-1])
    assert corner == (end[0], start[1])


def test_neighbouring_bins_share_an_outline():
    root = check(ExponentHistogram("t", [Series("a", [-3, -2, 5], [0.5, 0.25, 0.25])]))
    assert paths(root, "line")[-1].count("M") == 2


def test_a_span_that_no_data_reaches_is_left_out():
    spans = [Span(0.5, None, "seen"), Span(50, 60, "far")]
    text = to_svg(LineChart("t", "x", "y", [Series("s", [0, 1], [1, 2])], spans=spans))
    assert ">seen<" in text
    assert ">far<" not in text


def test_labels_of_spans_do_not_overlap():
    spans = [Span(i / 10, i / 10 + 0.1, f"a rather long label {i}") for i in range(10)]
    root = check(LineChart("t", "x", "y", [Series("s", [0, 1], [1, 2])], spans=spans))
    placed = [(float(n.get("x")), n.get("y")) for n in root.iter() if n.get("class") == "small"]
    assert len(placed) == len(set(placed)) == 10
    for x, y in placed:
        assert all(abs(x - other) > 90 for other, row in placed if row == y and other != x)


def test_a_long_name_is_cut_and_told_on_hover():
    name = "encoder." * 60
    root = check(LineChart(name, name, name, [Series(name, [0, 1], [0, 1]), Series("b", [0], [0])]), 390)
    cut = [node for node in root.iter() if (node.text or "").endswith("\u2026")]
    assert len(cut) >= 3
    assert all(node[0].text == name for node in cut)


def test_thousands_of_markers_stay_small():
    markers = [Marker(i, None, "skipped") for i in range(20000)]
    text = to_svg(LineChart("t", "x", "y", [Series("s", range(20000), range(20000))], markers=markers))
    assert len(text) < 60_000
    assert "and 19988 more markers" in text


@given(
    st.lists(st.none() | st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=400),
    st.integers(3, 60),
)
def test_thinning_keeps_extremes_gaps_and_order(points, limit):
    kept = thin(points, limit)
    assert len(kept) <= max(limit, limit // 3 * 3 + 2)
    known, before = [p[1] for p in kept if p], [p[1] for p in points if p]
    assert (min(known), max(known)) == (min(before), max(before)) if before else not known
    assert (None in kept) == (None in points)
    remaining = iter(points)
    assert all(any(point == other for other in remaining) for point in kept)
    assert sum(map(len, runs(kept))) == len(known)


def test_a_hundred_thousand_points_make_a_small_drawing():
    size = 100_000
    values = [math.sin(i / 900) for i in range(size)]
    values[77_777] = 5.0
    chart = LineChart("t", "x", "y", [Series("s", range(size), values, values, values)])
    root = check(chart)
    assert len(ET.tostring(root)) < 40_000
    heights = sorted(float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", paths(root, "line")[-1]))
    assert heights[0] < 70 < 150 < heights[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Series("s", [1], [1, 2]),
        lambda: Series("s", [1], [1], low=[1]),
        lambda: Series("s", [1], [1], [1], [1, 2]),
        lambda: Bars("b", [1], low=[1]),
        lambda: BarChart("c", ["a"], [Bars("b", [1, 2])], "v"),
        lambda: HeatMap("c", ["a"], ["b"], [[1, 2]], "v"),
        lambda: HeatMap("c", ["a", "b"], ["c"], [[1]], "v"),
        lambda: HeatMap("c", ["a"], ["b"], [[1]], "v", pale=1, dark=1),
        lambda: HeatMap("c", ["a"], ["b"], [[1]], "v", dark=math.inf),
    ],
)
def test_contradictions_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_text_form():
    chart = LineChart("Loss", "step", "nats", [Series("O2", range(3), [3, math.nan, 1]), Series("empty", [], [])])
    assert chart.to_text().splitlines() == [
        "Loss (nats over step)",
        "  O2: 3 to 1, smallest 1, largest 3, 2 points and 1 not finite",
        "  empty: no finite point",
    ]
