"""Optimizers of torch's names and arguments that keep float32 masters of 16-bit parameters and step in one pass."""

from ._adam import Adam, AdamW
from ._base import FusedOptimizer
from ._layerwise import LAMB, NovoGrad
from ._loading import float32_states
from ._momentum import Lion, Muon
from ._sgd import SGD, Adagrad

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "Lion", "Muon", "NovoGrad", "float32_states"]
