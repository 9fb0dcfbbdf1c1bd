"""A model in float32 for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..masters import Masters
from ..modules import Conversion


@contextmanager
def in_float32(
    models: Iterable[nn.Module], masters: Masters, conversions: Sequence[Conversion], device_type: str
) -> Iterator[None]:
    """Parameters hold their masters, buffers are float32, nothing casts; gradients are put aside and given back."""
    grads = {p: p.grad for model in models for p in model.parameters() if p.grad is not None}
    try:
        masters.full()
        for parameter in grads:
            parameter.grad = None
        for conversion in conversions:
            conversion.bypass()
            conversion.to_float()
        with torch.autocast(device_type, enabled=False):
            yield
    finally:  # each undoes what was done of it, wherever an interrupt came
        for conversion in conversions:
            conversion.to_low()
        masters.low()
        for conversion in conversions:
            conversion.resume()
        for parameter, grad in grads.items():
            parameter.grad = grad
