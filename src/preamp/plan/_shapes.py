"""Models on the meta device, whose tensors have shapes and no memory."""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..errors import PolicyError, PreampError

MOST = 10**18
"""More parameters than this are taken for a typing error."""

COLUMNS = 4096
"""The columns of the matrix that stands for a number of parameters."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:e[+-]?\d{1,3})?)\s*([kmbt]?)", re.IGNORECASE)


def count_of(given: Any) -> int:
    """The number of parameters that a person writes: 7e9, "7e9", "7B", "350M". `PreampError` for anything else."""
    text = str(given) if isinstance(given, (int, float, str)) and not isinstance(given, bool) else ""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise PreampError(
            f"params={given!r} is no number of parameters: write one above 0, such as 7e9, 7B or 350M, or give a model"
        )
    number = Decimal(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= number <= MOST or number != int(number):
        raise PreampError(f"params={given!r}: a model has a whole number of parameters, from 1 to {MOST:.0e}")
    return int(number)


def model_of(count: int) -> nn.Module:
    """So many parameters: a matrix, and what is left over as a vector."""
    rows, rest = divmod(count, COLUMNS)
    shapes = [shape for shape in ((rows, COLUMNS), (rest,)) if shape[0]]
    model = nn.Module()
    for number, shape in enumerate(shapes):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.empty(shape, device="meta")))
    return model


def shapes_of(model: nn.Module) -> nn.Module:
    """A model again, with parameters on the meta device."""
    empty: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise PolicyError(
                f"the parameter {name} is lazy and has no size yet: run one batch through the model first"
            )
        bare = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(bare, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():  # whose values decide on their dtype, and which nothing writes
        empty[id(buffer)] = buffer
    return copy.deepcopy(model, empty)
