"""The suite `training`: whole training steps against torch.amp, in a fixed time, and what they say about the goals."""

from ._contenders import Contender, Trainer
from ._goals import goals, goals_table
from ._measure import Clock
from ._models import ResNet, feed_forward
from ._rows import TrainingRow, training_table
from ._suite import GROUPS, SIZES, estimates, training
from ._works import Work, works

__all__ = [
    "GROUPS",
    "SIZES",
    "Clock",
    "Contender",
    "ResNet",
    "Trainer",
    "TrainingRow",
    "Work",
    "estimates",
    "feed_forward",
    "goals",
    "goals_table",
    "training",
    "training_table",
    "works",
]
