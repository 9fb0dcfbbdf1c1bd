"""What a session and its optimizers know about each parameter: how its value and its states are stored, and since when.

Only this room asks what has changed since the last step.
"""

from .buckets import Bucket, Buckets, Collected
from .gradients import Gradients
from .leaves import (
    KEPT,
    Kept,
    clear_gradients,
    dtype_of_gradient,
    gradients_of,
    parameters_in,
    parameters_of,
    summed,
    whole,
)
from .masters import Masters
from .no_masters import NoMasters
from .record import Record, is_marked, mark
from .split import SplitMasters
from .state import Steps, cast_states
from .swap import rebuild_reducers, set_data, wrappers_of

__all__ = [
    "KEPT",
    "Bucket",
    "Buckets",
    "Collected",
    "Gradients",
    "Kept",
    "Masters",
    "NoMasters",
    "Record",
    "SplitMasters",
    "Steps",
    "cast_states",
    "clear_gradients",
    "dtype_of_gradient",
    "gradients_of",
    "is_marked",
    "mark",
    "parameters_in",
    "parameters_of",
    "rebuild_reducers",
    "set_data",
    "summed",
    "whole",
    "wrappers_of",
]
