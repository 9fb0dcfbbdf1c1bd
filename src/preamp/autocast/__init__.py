"""Regions of mixed precision: which operation runs in which dtype."""

from ._decorators import float_function, half_function, promote_function
from ._region import autocast, decorated
from ._registry import MARKER, REGISTRY

__all__ = ["MARKER", "REGISTRY", "autocast", "decorated", "float_function", "half_function", "promote_function"]
