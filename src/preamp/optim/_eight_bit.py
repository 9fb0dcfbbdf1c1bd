"""The states of Adam in 8 bits: which parameters have them, what they are called, and the way there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from ..fused import blocks_of, dequantize, quantize

SMALLEST = 4096
"""Elements from which on a parameter's moments go into 8 bits. Norms and biases have fewer, and would save little."""

NAMES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
"""Names of states in the order in which a step takes them."""

_CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}


def is_large(param: Tensor) -> bool:
    """Whether a parameter is one whose moments go into 8 bits: not small, and not float64."""
    return param.numel() >= SMALLEST and param.dtype in (torch.float32, *LOW_DTYPES)


def is_8bit(states: Mapping[str, Any]) -> bool:
    """Whether a parameter's states, or those of a bucket, are in 8 bits."""
    return "exp_avg_scale" in states


def new_8bit(name: str, param: Tensor) -> Tensor:
    """A state before the first step: codes in the memory order of the parameter, or scales."""
    if name in _CODES:
        return torch.zeros_like(param, dtype=_CODES[name], memory_format=torch.preserve_format)
    return torch.zeros(blocks_of(param.numel()), dtype=torch.float32, device=param.device)


def as_8bit(state: dict[str, Any]) -> None:
    """Moments as they were loaded (codes as whole floating numbers, or moments in full) as codes and scales."""
    coded = is_8bit(state)
    for name, codes in _CODES.items():
        if coded:
            state[name] = state[name].to(codes)
        elif name in state:
            values = state[name].to(torch.float32)
            dense = torch.empty_like(values).copy_(values)
            state[name], state[f"{name}_scale"] = quantize(dense, codes)


def as_float32(state: dict[str, Any]) -> None:
    """Loaded codes and scales, if they are that, as moments in full."""
    if not is_8bit(state):
        return
    for name, codes in _CODES.items():
        dtype = state[name].dtype if state[name].is_floating_point() else torch.float32
        state[name] = dequantize(state[name].to(codes), state.pop(f"{name}_scale").to(torch.float32)).to(dtype)
