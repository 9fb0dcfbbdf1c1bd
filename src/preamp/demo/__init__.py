"""`preamp demo`: four real networks, trained at several levels and compared."""

from ._plan import Plan, make_plan
from ._range_test import range_test
from ._report import build, results_dict, schema, write
from ._run import Results, run, torchrun
from ._tables import judge, task_table
from ._trial import Trial, join_ranks, run_trial

__all__ = [
    "Plan",
    "Results",
    "Trial",
    "build",
    "join_ranks",
    "judge",
    "make_plan",
    "range_test",
    "results_dict",
    "run",
    "run_trial",
    "schema",
    "task_table",
    "torchrun",
    "write",
]
