"""Precision of modules: converts a model's parameters, and makes modules cast their inputs and outputs."""

from ._casting import Casting, CastingModule, Subclasses
from ._conversion import Conversion
from ._exported import Exports
from ._owned import check_free
from ._precisions import NORMS, is_norm

__all__ = [
    "NORMS", "Casting", "CastingModule", "Conversion", "Exports", "Subclasses", "check_free",
    "is_norm",
]  # fmt: skip
