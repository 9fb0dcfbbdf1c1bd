import sys

import pytest

from preamp.errors import MissingExtra
from preamp.report import BarChart, Bars, ExponentHistogram, HeatMap, LineChart, Marker, Series, Span, write_png

SERIES = (
    Series("_$unclosed", [0, 1, 2], [1, None, 3], [0, 0, 0], [4, 4, 4]),
    Series("\u6f22 reference", [0, 2], [0, 2], dashed=True, steps=True),
)
SPANS = (Span("x", 0, 1, "$range"), Span("y", None, 2, "low"), Span("x", 90, 99, "far"))
CHARTS = [
    LineChart("$loss", "x $", "y", SERIES, markers=(Marker(1, None, "$skip"), Marker(2, 2, "best")), spans=SPANS),
    LineChart("log", "x", "y", SERIES, x_log=True, y_log2=True),
    LineChart("empty", "x", "y", (), y_log=True),
    ExponentHistogram("h", SERIES, spans=SPANS),
    BarChart("b", ["a $", "b"], [Bars("x", [1, None], [0.5, None], [2, None]), Bars("_y", [2, 3])], "ms"),
    BarChart("none", [], [], "ms", log=True),
    HeatMap("$ heat", ["a $", "_b"], ["x", "y"], [[0.5, None], [1, 0]], "share", percent=True),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_chart_becomes_a_png(chart, tmp_path):
    pytest.importorskip("matplotlib")
    path = write_png(chart, tmp_path / "chart.png", dpi=60)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == round(7.6 * 60)
    assert [file.name for file in tmp_path.iterdir()] == ["chart.png"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="report"):
        write_png(CHARTS[0], tmp_path / "chart.png")
    assert not list(tmp_path.iterdir())
