"""Regions of mixed precision: which operation runs in which dtype."""

from ._decorators import float_function, half_function, promote_function
from ._nodes import RegionNodes, nodes_behind
from ._products import MARKER, PRODUCTS, widened
from ._region import autocast, decorated
from ._registry import REGISTRY
from ._vmapped import VMAPPED

__all__ = [
    "MARKER",
    "PRODUCTS",
    "REGISTRY",
    "VMAPPED",
    "RegionNodes",
    "autocast",
    "decorated",
    "float_function",
    "half_function",
    "nodes_behind",
    "promote_function",
    "widened",
]
