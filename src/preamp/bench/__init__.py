"""Measuring: training runs of the zoo, and races between contenders."""

from ._counting import Counts, count
from ._machine import environment, keep_heap
from ._race import Outcome, Row, race
from ._range_test import RangeTest, lr_chart, range_test
from ._ranks import join_ranks
from ._replay import Replay, replay
from ._results import Results
from ._schedules import ScheduleRow, schedule_table, schedules
from ._suites import PARTS, SUITES, suite_named, suite_table
from ._traces import Trace, load_trace, record
from ._trial import EXPONENTS, GradientHistogram, Trial, make_optimizer, run_trial
from .models import report as models_report
from .training import TrainingRow

__all__ = [
    "EXPONENTS",
    "PARTS",
    "SUITES",
    "Counts",
    "GradientHistogram",
    "Outcome",
    "RangeTest",
    "Replay",
    "Results",
    "Row",
    "ScheduleRow",
    "Trace",
    "TrainingRow",
    "Trial",
    "count",
    "environment",
    "join_ranks",
    "keep_heap",
    "load_trace",
    "lr_chart",
    "make_optimizer",
    "models_report",
    "race",
    "range_test",
    "record",
    "replay",
    "run_trial",
    "schedule_table",
    "schedules",
    "suite_named",
    "suite_table",
]
