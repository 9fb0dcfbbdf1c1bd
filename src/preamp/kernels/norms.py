"""L2 norms that are right for long tensors too.

On a CPU torch adds up all squares of a tensor in the few float32 of one vector register: where there are 23 million of
them, the norm comes out a thousandth too small. Here they are added up in rows, which all threads can share, and the
norms of the rows in float64. The bits do not depend on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from .lists import walkable

LONG = 2**19
"""Entries from which on a tensor is cut into rows; below, that would take longer."""

ROW = 2**14

PLAIN = (Tensor, Parameter)
"""Others, DTensors for one, may not be laid out as they look."""


def l2_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor, 0-d. They are strided, and at least float32 or complex64."""
    by_rows = [t.numel() >= LONG and t.device.type == "cpu" and type(t) in PLAIN and walkable(t) for t in tensors]
    if not any(by_rows):
        return list(torch._foreach_norm(tensors)) if tensors else []
    others = [tensor for tensor, long in zip(tensors, by_rows, strict=True) if not long]
    norms = iter(torch._foreach_norm(others) if others else ())
    return [_by_rows(tensor) if long else next(norms) for tensor, long in zip(tensors, by_rows, strict=True)]


def norm_of_norms(norms: Tensor) -> Tensor:
    """The norm of everything, 0-d float32, of norms of its parts."""
    wide = torch.float32 if norms.device.type == "mps" else torch.float64  # for squares of large norms
    norm: Tensor = torch.linalg.vector_norm(norms, dtype=wide).float()
    return norm


def _by_rows(tensor: Tensor) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # in the order in which it lies in memory
    whole = tensor.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:]).reshape(1)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([rows, rest]), dtype=torch.float64).to(rows.dtype)
    return norm
