"""The suite `training`: whole training steps against torch.amp, in a fixed time."""

from ._contenders import BF16, Contender, Trainer
from ._measure import Clock
from ._rows import TrainingRow, training_table
from ._suite import GROUPS, SIZES, estimates, training
from ._works import Batch, Work, works

__all__ = [
    "BF16",
    "GROUPS",
    "SIZES",
    "Batch",
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
