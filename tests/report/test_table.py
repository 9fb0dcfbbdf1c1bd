import json
import math

import pytest

from preamp.report import Column, Table, format_number, to_json

TABLE = Table(
    "Levels",
    [Column("level"), Column("time", "ms", 2), Column("gap"), Column("ok")],
    [
        ("O0", 12.345, None, True),
        ("O2", 1.0, -1.5e-7, False),
        ("a|b <i>", float("nan"), float("inf"), None),
    ],
    notes=("Median of *20*.",),
)


def test_text_is_aligned():
    assert TABLE.to_text().splitlines() == [
        "Levels",
        "level    time (ms)      gap  ok",
        "-------  ---------  -------  ---",
        "O0           12.35        -  yes",
        "O2            1.00  -1.5e-7  no",
        "a|b <i>        nan      inf  -",
        "Median of *20*.",
    ]


def test_wide_characters_take_two_cells():
    lines = Table("", ["name", "n"], [("\u6f22\u5b57", 1), ("ab", 10)]).to_text().splitlines()
    assert lines[2:] == ["\u6f22\u5b57   1", "ab    10"]
    lines = Table("", ["name", "n"], [("e\u0301", 1), ("abcd", 10)]).to_text().splitlines()
    assert lines[2:] == ["e\u0301      1", "abcd  10"]  # the accent stands on the letter


def test_a_table_without_rows_is_its_headings():
    assert Table("", ["a", "bb"], []).to_text() == "a  bb\n-  --"


def test_line_breaks_in_a_cell_do_not_break_the_table():
    assert Table("", ["a"], [("x\ny",)]).to_text().splitlines()[-1] == "x y"


def test_markdown_is_escaped_and_aligned():
    lines = TABLE.to_markdown().splitlines()
    assert lines[3] == "| :--- | ---: | ---: | :--- |"
    assert lines[6] == "| a\\|b &lt;i> | nan | inf | - |"
    assert lines[-1] == "Median of \\*20\\*."


def test_dict_is_strict_json():
    found = json.loads(json.dumps(TABLE.to_dict(), allow_nan=False))
    assert found["rows"] == [["O0", 12.345, None, True], ["O2", 1.0, -1.5e-7, False], ["a|b <i>", None, None, None]]
    assert found["columns"][1] == {"name": "time", "unit": "ms", "digits": 2, "align": "right"}


def test_a_short_row_is_refused():
    with pytest.raises(ValueError, match="row 1 of table 'T' has 1 cells for 2 columns"):
        Table("T", ["a", "b"], [(1, 2), (3,)])


def test_an_unknown_alignment_is_refused():
    with pytest.raises(ValueError, match="centre"):
        Column("a", align="centre")


@pytest.mark.parametrize(("value", "digits", "text"), [
    (0.0, None, "0"), (0.0, 2, "0.00"), (-0.0, 1, "0.0"), (3, 2, "3.00"), (65536, None, "65536"),
    (65504.0, None, "65504"), (1.0, None, "1"), (9999.96, None, "10000"), (5.96e-8, None, "5.96e-8"),
    (0.004, 2, "4.0e-3"), (-0.004, 2, "-4.0e-3"), (1.7e308, 1, "1.7e308"), (5e-324, None, "4.941e-324"),
    (-math.inf, 2, "-inf"), (math.nan, 2, "nan"),
])  # fmt: skip
def test_numbers(value, digits, text):
    assert format_number(value, digits) == text


def test_json_takes_what_scripts_hold():
    np = pytest.importorskip("numpy")
    value = {1: {3, 2}, "a": np.float32(0.5), "b": np.array([1.0, np.nan]), "c": (object, 10**400)}
    assert to_json(value) == {"1": [2, 3], "a": 0.5, "b": [1.0, None], "c": [str(object), 10**400]}
