"""The states of Adam in 8 bits: which parameters have them, their names, and conversion from and to float32."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..formats import LOW_DTYPES
from ..kernels import BLOCK, blocks_in_a_row, blocks_of, dequantize, quantize
from ..sharding import Parted, held_here, is_sharded, placed_like

SMALLEST = 4096
"""Elements from which on a parameter's moments go into 8 bits. Norms and biases have fewer, and would save little."""

NAMES = ("exp_avg_8bit", "exp_avg_scale", "exp_avg_sq_8bit", "exp_avg_sq_scale")
"""Names of states in the order in which a step takes them; none that other optimizers have for moments in full."""

SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

CODES = {"exp_avg_8bit": torch.int8, "exp_avg_sq_8bit": torch.uint8}


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
    placed = zip(param.device_mesh.shape, param.placements, strict=True)
    cuts = [(size, each.dim) for size, each in placed if not (each.is_replicate() or each.dim == 0)]
    return prod(size for size, _ in cuts) if all((dim, param.dim()) == (1, 2) for _, dim in cuts) else 0


def is_8bit(states: Mapping[str, Any]) -> bool:
    """Whether a parameter's states are in 8 bits."""
    return not states.keys().isdisjoint(NAMES)


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
    """Moments as torch has loaded them (codes as whole floating numbers, or moments in full) as codes and scales."""
    coded = is_8bit(state)
    for name, scale, dtype in _PAIRS:
        moment = name.removesuffix("_8bit")
        if coded:
            state[name] = state[name].to(dtype)
            scales = state[scale]
            state[scale] = scales if is_sharded(scales) else scales.reshape(-1)  # of shards: two dimensions
        elif moment in state:
            made, scales = quantize(_dense(held_here(state.pop(moment)).to(torch.float32)), dtype)
            state[name] = placed_like(param, made, tuple(param.shape))
            state[scale] = _scales(scales, param)


def as_float32(row: Any) -> Any:
    """The saved states of one parameter, with moments in full in place of codes and scales."""
    if not isinstance(row, Mapping) or not is_8bit(row):
        return row
    wide = {name: value for name, value in row.items() if name not in NAMES}
    for name, scale, dtype in _PAIRS:
        codes: Any = row.get(name)
        scales: Any = row.get(scale)
        given = isinstance(codes, Tensor) and isinstance(scales, Tensor)
        of_whole = given and is_sharded(codes) and not is_sharded(scales)
        if not given or held_here(scales).numel() != blocks_of((codes if of_whole else held_here(codes)).numel()):
            raise OptimizerError(
                f"the states {name!r} and {scale!r} of a parameter are codes in 8 bits and a scale for each block of "
                "them, and these do not fit each other, so no moment can be made of them: give both as they were saved"
            )
        here = _dense(held_here(codes).to(dtype))
        if of_whole:  # blocks may be cut
            each = scales.reshape(-1).repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)
            values = dequantize(here, scales.new_ones(blocks_of(here.numel()))) * Parted(codes).part(each)
        else:
            values = dequantize(here, held_here(scales).reshape(-1).to(torch.float32))
        wide[name.removesuffix("_8bit")] = placed_like(codes, values, tuple(codes.shape))
    return wide


def stored_as(row: dict[str, Any], param: Tensor, stored: Mapping[str, Any], masters: bool) -> dict[str, Any]:
    """A parameter's states to be read into: itself if what is stored has the same form, else empty ones of that form.

    `stored`: meta tensors. `masters`: those, too. Codes come with the scales of the whole, also of a sharded tensor.
    """
    theirs = _forms(stored)
    if not masters:
        theirs = {name: form for name, form in theirs.items() if not name.startswith("master")}
    if theirs == _forms(row):
        return row
    made = {name: value for name, value in row.items() if name not in _FORMS}
    for name, (shape, dtype) in theirs.items():
        wide = name in SCALES
        made[name] = torch.zeros(shape, device=param.device) if wide else torch.zeros_like(param, dtype=dtype)
    return made


def _forms(states: Mapping[str, Any]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {n: (states[n].shape, dtype or states[n].dtype) for n, dtype in _FORMS.items() if n in states}


def _dense(tensor: Tensor) -> Tensor:
    """A copy without gaps in memory."""
    return torch.empty_like(tensor).copy_(tensor)


_FORMS = {**dict.fromkeys((*NAMES, "exp_avg", "exp_avg_sq", "master"), torch.float32), **CODES, "master_bits": None}
"""The dtypes in which moments and masters are read; None: as they are."""
_PAIRS = tuple((name, scale, CODES[name]) for name, scale in zip(CODES, SCALES, strict=True))
