"""`preamp demo`: four real networks, trained at several levels and compared."""

from ._plan import Plan, make_plan
from ._report import build, results_dict, schema, write
from ._run import Results, run, torchrun
from ._tables import judge, task_table

__all__ = [
    "Plan",
    "Results",
    "build",
    "judge",
    "make_plan",
    "results_dict",
    "run",
    "schema",
    "task_table",
    "torchrun",
    "write",
]
