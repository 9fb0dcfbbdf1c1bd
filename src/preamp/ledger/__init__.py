"""What a session and its optimizers know of each parameter: how its value and its states are stored, and since when.

The only place that asks whether somebody has changed something since the last step.
"""

from .buckets import Bucket, Buckets, Collected
from .masters import Masters
from .no_masters import NoMasters
from .packed import ShapeMismatch
from .shadows import Shadows, shadows_work
from .split import SplitMasters
from .state import State
from .steps import Steps
from .swap import rebuild_reducers

__all__ = [
    "Bucket",
    "Buckets",
    "Collected",
    "Masters",
    "NoMasters",
    "Shadows",
    "ShapeMismatch",
    "SplitMasters",
    "State",
    "Steps",
    "rebuild_reducers",
    "shadows_work",
]
