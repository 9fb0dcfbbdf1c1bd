"""Reading gradients, and editing them in place. Everything returned stays on the gradients' device."""

from ._edit import (
    check_and_unscale_,
    clip_values_,
    dense_values,
    global_norm,
    grouped,
    multiply_,
    present_in,
    reciprocal,
)
from ._read import Reading, read

__all__ = [
    "Reading", "check_and_unscale_", "clip_values_", "dense_values", "global_norm", "grouped", "multiply_",
    "present_in", "read", "reciprocal",
]  # fmt: skip
