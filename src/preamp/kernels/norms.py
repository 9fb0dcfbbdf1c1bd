"""L2 norms that are right for long tensors too.

On a CPU torch adds up all squares of a tensor in the few float32 numbers of one vector register; with 23 million
entries the norm comes out a thousandth too small. Here each row is summed separately, which threads can share, and the
norms of the rows are combined in float64. The bits do not depend on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from .lists import flat, walk_of

LONG = 2**19
"""Tensors with at least this many entries are cut into rows; for shorter ones that would take longer."""

ROW = 2**14

PLAIN = (Tensor, Parameter)
"""The memory of others, DTensors for example, may differ from their shape and strides."""


def l2_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, 0-d. Tensors are strided, and at least float32 or complex64."""
    by_rows = [
        t.numel() >= LONG and t.device.type == "cpu" and type(t) in PLAIN and walk_of(t) is not None for t in tensors
    ]
    if not any(by_rows):
        return list(torch._foreach_norm(tensors)) if tensors else []
    others = [tensor for tensor, long in zip(tensors, by_rows, strict=True) if not long]
    norms = iter(torch._foreach_norm(others) if others else ())
    return [_by_rows(tensor) if long else next(norms) for tensor, long in zip(tensors, by_rows, strict=True)]


def norm_of_norms(norms: Tensor) -> Tensor:
    """The norm of the whole, 0-d float32, from the norms of its parts."""
    wide = torch.float32 if norms.device.type == "mps" else torch.float64  # for squares of large norms
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=wide).float()
    return norm


def _by_rows(tensor: Tensor) -> Tensor:
    entries, whole = flat(tensor), tensor.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(entries[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(entries[whole:]).reshape(1)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64).to(rows.dtype)
    return norm
