"""1/scale, by which gradients are unscaled."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from ..kernels import reciprocal


class Reciprocal:
    """`reciprocal` of a scale, not to be written into.

    On a CPU, where comparing is cheaper, it is recomputed only if the scale has changed.
    """

    def __init__(self) -> None:
        self._scale = nan
        self._made: Tensor | None = None

    def __call__(self, scale: Tensor) -> Tensor:
        if scale.device.type != "cpu":
            return reciprocal(scale)
        value = scale.item()
        if self._made is None or value != self._scale:
            with torch.inference_mode(False):  # it may be used outside later
                self._scale, self._made = value, reciprocal(scale)
        return self._made
