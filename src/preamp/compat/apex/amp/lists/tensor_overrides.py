"""Methods of `torch.Tensor`: those of the functions in `torch`, and the operators."""

from __future__ import annotations

import torch

from . import torch_overrides as _torch

MODULE = torch.Tensor

FP16_FUNCS = [name for name in _torch.FP16_FUNCS if hasattr(MODULE, name)] + ["__matmul__"]

FP32_FUNCS = [name for name in _torch.FP32_FUNCS if hasattr(MODULE, name)] + ["__ipow__", "__pow__", "__rpow__", "cpu"]

CASTS = [name for name in _torch.CASTS if hasattr(MODULE, name)] + [
    f"__{prefix}{name}__"
    for name in ("add", "sub", "mul", "div", "truediv")
    for prefix in ("", "r", "i")
    if hasattr(MODULE, f"__{prefix}{name}__")
] + ["__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__"]  # fmt: skip

SEQUENCE_CASTS: list[str] = []

BANNED_FUNCS: list[tuple[str, str]] = []
