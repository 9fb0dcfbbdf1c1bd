import json
import os
import re
import subprocess
import sys

import pytest
from tests.report.tree import Tree

from preamp.report import (
    BarChart,
    Bars,
    Column,
    ExponentHistogram,
    Finding,
    LineChart,
    Marker,
    Report,
    Section,
    Series,
    Span,
    Table,
)

EVIL = '<script>alert(1)</script><img src=x onerror=alert(2)>"\' onload="x" ]]> & \x00\x0b \ud800 `c`'


class Page:
    """The tags, the attributes and the text of a page."""

    def __init__(self, text):
        elements = Tree(text).root.all()
        self.tags = [element.tag for element in elements]
        self.attributes = [(each.tag, name, value) for each in elements for name, value in each.attributes.items()]
        self.texts = {tag: [each.own for each in elements if each.tag == tag] for tag in self.tags}


def rich(word, **changes):
    """A report with `word` in every place that takes text."""
    span = (Span(0, 0.5, word),)
    series = (Series(word, [0, 1], [0, 1]), Series("b", [0, 1], [1, 0], [0, 0], [1, 1]))
    items = (
        Finding("PA201", "error", word, word, word, "forward", word, 3, 4, {word: word, "n": float("nan")}, word),
        Finding("PA202", "warning", word, evidence=word),
        Table(word, [Column(word, word), "n"], [(word, -1.5)], notes=(word,)),
        LineChart(word, word, word, series, markers=(Marker(0.5, 0.5, word),), spans=span, note=word),
        ExponentHistogram(word, series, x_label=word, y_label=word, spans=span, note=word),
        BarChart(word, [word, "b"], [Bars(word, [1, 2]), Bars("o", [2, 1])], word, note=word),
    )
    values = {"summary": word, "environment": {word: word}, "created": word, "data": {word: [word, float("nan")]}}
    return Report(word, word, [Section(word, word, items)] * 4, **{**values, **changes})


def test_nothing_that_a_script_named_becomes_a_tag():
    plain, evil = Page(rich("word").to_html()), Page(rich(EVIL).to_html())
    assert set(evil.tags) <= set(plain.tags) | {"code"}
    assert "img" not in evil.tags
    assert evil.tags.count("script") == 1
    assert {name for _, name, _ in evil.attributes} <= {name for _, name, _ in plain.attributes}
    assert not [name for _, name, _ in evil.attributes if name.startswith("on")]
    assert "alert(1)" in "".join(evil.texts["h1"])


def test_the_page_loads_nothing():
    page = Page(rich("word").to_html())
    assert not {"iframe", "object", "embed", "base", "form", "use", "image", "img"} & set(page.tags)
    for tag, name, value in page.attributes:
        if name in ("href", "src", "srcset", "action", "xlink:href", "style", "data"):
            assert value.startswith("#") or (tag, value) == ("link", "data:,")
        elif "://" in value:
            assert (name, value) == ("xmlns", "http://www.w3.org/2000/svg")
    assert ("script", "type", "application/json") in page.attributes
    css = "".join(page.texts["style"])
    assert not re.search(r"url\(|@import|@font-face|://", css)
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "script" not in policy


def test_a_notebook_shows_the_page_in_a_frame():
    frame = Page(rich(EVIL)._repr_html_())
    (source,) = [value for tag, name, value in frame.attributes if (tag, name) == ("iframe", "srcdoc")]
    assert frame.tags == ["iframe"] and source.lstrip().startswith("<!DOCTYPE html>") and "</html>" in source


@pytest.mark.parametrize("word", ["word", EVIL, "</script><!--<script>", "\u2028\u2029&lt;"])
def test_the_embedded_data_parses_back(word):
    page = Page(rich(word).to_html())
    (text,) = page.texts["script"]
    assert json.loads(text) == {word: [word, None]}
    assert "<" not in text


def test_anchors_are_unique_and_linked():
    page = Page(rich("One two").to_html())
    anchors = [value for tag, name, value in page.attributes if (tag, name) == ("section", "id")]
    assert anchors == ["one-two", "one-two-2", "one-two-3", "one-two-4", "environment"]
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == [f"#{anchor}" for anchor in ("details", *anchors)]
    few = Report("t", "v", [Section("a"), Section("b"), Section("c")])
    assert "nav" not in Page(few.to_html()).tags


def test_numbers_are_right_aligned_with_a_true_minus():
    html = Report("t", "v", [Section("s", items=[Table("", ["n"], [(-1.5,), (None,)])])]).to_html()
    assert '<td class="right brief">\u22121.5</td>' in html
    assert '<td class="right brief">-</td>' in html


def test_backticks_are_code_and_a_lone_one_is_a_character():
    html = Report("t", "v", [Section("s", "use `a<b` or `c` and 5` more")]).to_html()
    assert "<p>use <code>a&lt;b</code> or <code>c</code> and 5` more</p>" in html


@pytest.mark.parametrize(
    ("severities", "mood"),
    [((), "neutral"), (("info",), "neutral"), (("info", "warning"), "warning"), (("warning", "error"), "error")],
)
def test_the_mood_is_that_of_the_worst_finding(severities, mood):
    items = [Finding("PA201", severity, "m") for severity in severities]
    assert Report("t", "v", [Section("s", items=items)]).mood == mood
    assert Report("t", "v", [Section("s", items=items)], status="good").mood == "good"


def test_text_form():
    report = Report(
        "Title",
        "All is well.",
        [Section("Part", "One.\n\nTwo.", [Table("", ["a"], [(1,)])])],
        environment={"torch": "2", "n": 4},
    )
    assert report.to_text() == (
        "Title\n=====\n\nAll is well.\n\ntorch  2\nn      4\n\nPart\n----\n\nOne.\n\nTwo.\n\na\n-\n1\n"
    )


def test_dict_is_strict_json_with_findings_by_harm():
    found = json.loads(json.dumps(rich("w").to_dict(), allow_nan=False))
    assert [finding["severity"] for finding in found["findings"]] == ["error"] * 4 + ["warning"] * 4
    kinds = [item["kind"] for item in found["sections"][0]["items"]]
    assert kinds == ["finding", "finding", "table", "line_chart", "exponent_histogram", "bar_chart"]


def test_an_unknown_item_or_status_is_refused():
    with pytest.raises(TypeError, match="cannot show a dict"):
        Section("s", items=[{}])
    with pytest.raises(ValueError, match="status"):
        Report("t", "v", status="fine")


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    assert rich("first").write_html(path) == path
    before = path.read_bytes()

    def fail(self):
        raise RuntimeError("drawing failed")

    with monkeypatch.context() as patch:
        patch.setattr(LineChart, "to_text", fail)
        with pytest.raises(RuntimeError, match="drawing failed"):
            rich("second").write_html(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            rich("second").write_html(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    rich(EVIL).write_html(path)
    assert b"alert(1)" in path.read_bytes()


def test_importing_the_report_loads_no_heavy_package():
    code = "import sys, preamp.report\nprint([name for name in ('jinja2', 'numpy') if name in sys.modules])"
    ours = os.pathsep.join(sys.path)
    stub = "import sys, types, pathlib\npackage = types.ModuleType('preamp')\n"
    stub += "package.__path__ = [str(pathlib.Path(p) / 'preamp') for p in sys.path]\n"
    stub += "sys.modules['preamp'] = package\n"
    run = subprocess.run(
        [sys.executable, "-c", stub + code], env={**os.environ, "PYTHONPATH": ours}, capture_output=True, text=True
    )
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
