"""Linear layers, with GELU between two."""

from .fused_dense import (
    FusedDense,
    FusedDenseGeluDense,
    dense_no_bias_function,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

__all__ = [
    "FusedDense", "FusedDenseGeluDense", "dense_no_bias_function", "fused_dense_function",
    "fused_dense_gelu_dense_function",
]  # fmt: skip
