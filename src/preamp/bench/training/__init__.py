"""The suite `training`: whole training steps against torch.amp, in a fixed time."""

from ._contenders import Contender, Trainer
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
    "training",
    "training_table",
    "works",
]
