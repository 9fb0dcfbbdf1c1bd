"""Names in `torch`."""

from __future__ import annotations

import torch

MODULE = torch

FP16_FUNCS = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "prelu",
    "addmm", "addmv", "addr", "matmul", "mm", "mv",
    # Apex left these out where torch.version.cuda is missing: on CPUs and on ROCm a bmm stayed in float32
    "bmm", "baddbmm", "addbmm",
]  # fmt: skip

FP32_FUNCS = [
    # pointwise
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
    "pow",
    # sums of many
    "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var",
    # others
    "renorm",
]  # fmt: skip

CASTS = [
    # of several tensors
    "addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot",
    # binary
    "add", "div", "mul",
    # comparisons
    "eq", "equal", "ge", "gt", "le", "lt", "ne",
]  # fmt: skip
"""Run at the widest type of their arguments."""

SEQUENCE_CASTS = ["cat", "stack"]
"""The same, where the arguments are one sequence of tensors."""

BANNED_FUNCS: list[tuple[str, str]] = []
