"""Measuring: training runs of the zoo, and races between contenders."""

from ._machine import environment
from ._race import Outcome, race
from ._suites import SUITES, Row, suite_named
from ._trial import EXPONENTS, GradientHistogram, Trial, make_optimizer, run_trial

__all__ = [
    "EXPONENTS",
    "SUITES",
    "GradientHistogram",
    "Outcome",
    "Row",
    "Trial",
    "environment",
    "make_optimizer",
    "race",
    "run_trial",
    "suite_named",
]
