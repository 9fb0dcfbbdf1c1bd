"""Regions of mixed precision: which operation runs in which dtype."""

from ._decorators import float_function, half_function, promote_function
from ._products import MARKER, PRODUCTS, widened
from ._region import autocast, decorated
from ._registry import REGISTRY
from ._vmapped import VMAPPED

__all__ = [
    "MARKER",
    "PRODUCTS",
    "REGISTRY",
    "VMAPPED",
    "autocast",
    "decorated",
    "float_function",
    "half_function",
    "promote_function",
    "widened",
]
