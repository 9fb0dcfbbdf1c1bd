"""FastLayerNorm."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
