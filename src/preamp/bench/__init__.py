"""Measuring: training runs of the zoo, and races between contenders."""

from ._machine import environment, keep_heap
from ._race import Outcome, race
from ._range_test import RangeTest, lr_chart, range_test
from ._suites import SUITES, Row, suite_named
from ._trial import EXPONENTS, GradientHistogram, Trial, make_optimizer, run_trial

__all__ = [
    "EXPONENTS",
    "SUITES",
    "GradientHistogram",
    "Outcome",
    "RangeTest",
    "Row",
    "Trial",
    "environment",
    "keep_heap",
    "lr_chart",
    "make_optimizer",
    "race",
    "range_test",
    "run_trial",
    "suite_named",
]
