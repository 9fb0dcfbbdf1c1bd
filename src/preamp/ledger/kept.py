"""Masters as they are saved: float32, or a bfloat16 weight and bits. Whatever is loaded takes either form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..kernels import join

KEPT = {"split": torch.int16, "split24": torch.int8}
"""The dtype of the bits, for each `master=` of an optimizer with split masters."""

Kept = Tensor | tuple[Tensor, Tensor]
"""A master: a float32 tensor, or a bfloat16 weight and the bits that it lacks."""


def whole(name: str, kept: Any) -> Tensor:
    """A master in float32, in new memory if it was split. `StateError` for what is none."""
    shape_of(name, kept)
    return kept.to(torch.float32) if isinstance(kept, Tensor) else join(*kept)


def shape_of(name: str, kept: Any) -> tuple[int, ...]:
    """The shape of a master; `StateError` for what is none."""
    parts = list(kept) if isinstance(kept, (tuple, list)) and len(kept) == 2 else [kept]
    if all(isinstance(p, Tensor) and p.layout is torch.strided and p.device.type != "meta" for p in parts):
        dtypes = [p.dtype for p in parts]
        split = dtypes in [[torch.bfloat16, bits] for bits in KEPT.values()] and parts[0].shape == parts[1].shape
        if split or (len(parts) == 1 and parts[0].is_floating_point()):
            return tuple(parts[0].shape)
    seen = " and ".join(f"{p.dtype} {list(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.60}" for p in parts)
    raise StateError(
        f"the master {name!r} is {seen} in the state: a dense floating tensor is wanted, or a bfloat16 weight and its "
        "bits, int16 or int8, of the same shape"
    )
