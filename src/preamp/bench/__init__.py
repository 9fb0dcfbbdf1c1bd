"""Measuring: training runs of the zoo, and races between contenders."""

from ._counting import Counts, count
from ._machine import device_named, environment, keep_heap
from ._race import Outcome, race
from ._range_test import RangeTest, range_test
from ._report import bench_report
from ._results import Results, Row
from ._schedules import schedules
from ._suites import PARTS, SUITES, suite_named, suite_table
from ._traces import record
from ._trial import EXPONENTS, Trial, join_ranks, run_trial

__all__ = [
    "EXPONENTS",
    "PARTS",
    "SUITES",
    "Counts",
    "Outcome",
    "RangeTest",
    "Results",
    "Row",
    "Trial",
    "bench_report",
    "count",
    "device_named",
    "environment",
    "join_ranks",
    "keep_heap",
    "race",
    "range_test",
    "record",
    "run_trial",
    "schedules",
    "suite_named",
    "suite_table",
]
