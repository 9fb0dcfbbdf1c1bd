"""`preamp demo`: four real networks, trained at several levels and compared."""

from ._plan import Plan, make_plan
from ._report import build, results_dict, schema, write
from ._run import Results, run
from ._tables import judge, task_table
from ._trial import Trial, make_optimizer, run_trial

__all__ = [
    "Plan",
    "Results",
    "Trial",
    "build",
    "judge",
    "make_optimizer",
    "make_plan",
    "results_dict",
    "run",
    "run_trial",
    "schema",
    "task_table",
    "write",
]
