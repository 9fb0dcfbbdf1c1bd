"""Precision of modules: converts a model's parameters, and makes modules cast what they get and what they return."""

from ._casting import SHADOWED, Casting, CastingModule
from ._conversion import NORMS, Conversion
from ._precisions import unwrapped

__all__ = ["NORMS", "SHADOWED", "Casting", "CastingModule", "Conversion", "unwrapped"]
