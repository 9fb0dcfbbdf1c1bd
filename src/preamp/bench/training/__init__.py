"""The suite `training`: whole training steps against torch.amp, in a fixed time."""

from ._contenders import Contender, Trainer
from ._measure import Clock
from ._rows import TrainingRow, training_table
from ._suite import GROUPS, SIZES, estimates, training
from ._works import Work, works

__all__ = [
    "GROUPS",
    "SIZES",
    "Clock",
    "Contender",
    "Trainer",
    "TrainingRow",
    "Work",
    "estimates",
    "training",
    "training_table",
    "works",
]
