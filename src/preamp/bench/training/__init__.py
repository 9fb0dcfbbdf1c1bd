"""The suite `training`: whole training steps against torch.amp, in a fixed time."""

from ._contenders import BF16, Contender, Trainer
from ._measure import Clock
from ._rows import training_table
from ._suite import training
from ._works import Batch, Work, works

__all__ = ["BF16", "Batch", "Clock", "Contender", "Trainer", "Work", "training", "training_table", "works"]
