"""Precision of modules: converts a model's parameters, and makes modules cast their inputs and outputs."""

from ._casting import Casting, CastingModule
from ._conversion import Conversion, loses_nothing
from ._exported import give_programs_own_values
from ._norms import NORMS, is_norm
from ._owned import check_free
from ._precisions import unwrapped
from ._subclasses import Subclasses

__all__ = [
    "NORMS", "Casting", "CastingModule", "Conversion", "Subclasses", "check_free",
    "give_programs_own_values", "is_norm", "loses_nothing", "unwrapped",
]  # fmt: skip
