"""Telling autograd of writes that went past it: by kernels of one's own, or through another tensor's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._list import TensorList


def count_writes(tensors: Sequence[Tensor]) -> None:
    """Count a write to every tensor, as an operator in place would.

    A backward pass that still needs the old values then says so instead of using the new ones, and whoever watches
    `_version` sees that something has changed.
    """
    if isinstance(tensors, TensorList) and tensors.owners is not None:
        tensors = tensors.owners
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # older releases take one tensor
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
