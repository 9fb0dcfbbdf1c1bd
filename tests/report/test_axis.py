import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preamp.report.axis import fit


def labels(axis):
    return [tick.label for tick in axis.ticks if tick.label]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ((0, 10), "linear", ["0", "2", "4", "6", "8", "10"]),
        ((0, 24000), "linear", ["0", "5,000", "10,000", "15,000", "20,000"]),
        ((-0.3, 0.3), "linear", ["\u22120.3", "\u22120.2", "\u22120.1", "0.0", "0.1", "0.2", "0.3"]),
        ((0, 4e-9), "linear", ["0", "1e-9", "2e-9", "3e-9", "4e-9"]),
        ((1, 1000), "log10", ["1", "10", "100", "1,000"]),
        ((1e-6, 1), "log10", ["10\u207b\u2076", "10\u207b\u2074", "10\u207b\u00b2", "10\u2070"]),
        ((2, 60), "log10", ["2", "5", "10", "20", "50"]),
        ((2, 3), "log10", ["2.0", "2.2", "2.4", "2.6", "2.8", "3.0"]),
        ((4, 64), "log2", ["4", "8", "16", "32", "64"]),
        ((4096, 65536), "log2", ["2\u00b9\u00b2", "2\u00b9\u00b3", "2\u00b9\u2074", "2\u00b9\u2075", "2\u00b9\u2076"]),
        ((-40, 16), "exponent", ["2\u207b\u2074\u2070", "2\u207b\u00b3\u00b2", "2\u207b\u00b2\u2074",
                                 "2\u207b\u00b9\u2076", "2\u207b\u2078", "2\u2070", "2\u2078", "2\u00b9\u2076"]),
    ],
)  # fmt: skip
def test_ticks_are_round(values, kind, expected):
    assert labels(fit(values, kind, ticks=8 if kind == "exponent" else 6)) == expected


@pytest.mark.parametrize("kind", ["linear", "log10", "log2", "exponent"])
@given(values=st.lists(st.floats() | st.none(), max_size=6), zero=st.booleans(), ticks=st.integers(2, 10))
def test_every_float_has_a_place_or_none(kind, values, zero, ticks):
    axis = fit(values, kind, zero=zero, ticks=ticks).place(50, 650)
    assert axis.low < axis.high
    assert len(axis.ticks) < 120
    assert all(axis.low <= tick.at <= axis.high for tick in axis.ticks)
    for value in values:
        place = axis.project(value)
        if place is None:
            assert value is None or not math.isfinite(value) or kind != "linear"
        else:
            assert 50 <= place <= 650


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2))
def test_places_keep_the_order(values):
    axis = fit(values)
    places = [axis.project(value) for value in sorted(values)]
    assert places == sorted(places)


def test_labels_of_huge_tiny_and_nearly_equal_values_differ():
    for values in ((-1.7e308, 1.7e308), (5e-324, 5e-323), (1.0, 1.0 + 1e-7), (1e20, 1e20 + 1e12)):
        shown = labels(fit(values))
        assert len(shown) >= 3
        assert len(set(shown)) == len(shown)
