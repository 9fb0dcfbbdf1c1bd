"""The states of Adam in 8 bits: which parameters have them, their names, and conversion from and to float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from ..kernels import blocks_in_a_row, blocks_of, dequantize, quantize
from ..sharding import held_here, is_sharded, placed_like

SMALLEST = 4096
"""Elements from which on a parameter's moments go into 8 bits. Norms and biases have fewer, and would save little."""

NAMES = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
"""Names of states in the order in which a step takes them."""

SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

CODES = {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8}


def takes_8bit(param: Tensor) -> bool:
    """Whether a parameter is one whose moments go into 8 bits: not small, not float64, and cut between blocks only."""
    large = param.numel() >= SMALLEST and param.dtype in (torch.float32, *LOW_DTYPES)
    return large and (not is_sharded(param) or _is_cut_between_blocks(param))


def _is_cut_between_blocks(param: Any) -> bool:
    """Shards of whole rows have whole blocks if rows do; those of a matrix's columns, if their rows do, too."""
    cuts = _cuts_of_rows(param)
    return cuts > 0 and blocks_in_a_row(param) > 0 and blocks_in_a_row(param) % cuts == 0


def _cuts_of_rows(param: Any) -> int:
    """Into how many parts rows are cut; 0 where it is along other dimensions."""
    cuts = 1
    for size, placed in zip(param.device_mesh.shape, param.placements, strict=True):
        if placed.is_replicate() or placed.dim == 0:
            continue
        if (placed.dim, param.dim()) != (1, 2):
            return 0
        cuts *= size
    return cuts


def is_8bit(states: Mapping[str, Any]) -> bool:
    """Whether a parameter's states, or those of a bucket, are in 8 bits."""
    return "exp_avg_scale" in states


def new_8bit(name: str, param: Tensor) -> Tensor:
    """A state before the first step: codes in the memory order of the parameter, or scales."""
    if name in CODES:
        return torch.zeros_like(param, dtype=CODES[name], memory_format=torch.preserve_format)
    blocks = blocks_of(held_here(param).numel())
    return _scales(torch.zeros(blocks, dtype=torch.float32, device=param.device), param)


def _scales(local: Tensor, like: Tensor) -> Tensor:
    """(blocks,); beside a DTensor (rows, blocks in a row), which can be cut where that is cut."""
    if not is_sharded(like):
        return local
    in_a_row = blocks_in_a_row(like)
    return placed_like(like, local.view(-1, in_a_row // _cuts_of_rows(like)), (like.shape[0], in_a_row))


def as_8bit(state: dict[str, Any], param: Tensor) -> None:
    """Moments as they were loaded (codes as whole floating numbers, or moments in full) as codes and scales."""
    coded = is_8bit(state)
    for name, codes in CODES.items():
        if coded:
            state[name] = state[name].to(codes)
            scales = state[f"{name}_scale"]
            state[f"{name}_scale"] = scales if is_sharded(scales) else scales.reshape(-1)  # of shards: two dimensions
        elif name in state:
            values = held_here(state[name]).to(torch.float32)
            dense = torch.empty_like(values).copy_(values)
            made, scales = quantize(dense, codes)
            state[name] = placed_like(param, made, tuple(param.shape))
            state[f"{name}_scale"] = _scales(scales, param)


def as_float32(state: dict[str, Any]) -> None:
    """Loaded codes and scales, if they are that, as moments in full."""
    if not is_8bit(state):
        return
    for name, codes in CODES.items():
        loaded, scales = state[name], held_here(state.pop(f"{name}_scale"))
        dtype = loaded.dtype if loaded.is_floating_point() else torch.float32
        wide = dequantize(held_here(loaded).to(codes), scales.reshape(-1).to(torch.float32)).to(dtype)
        state[name] = placed_like(loaded, wide, tuple(loaded.shape))
