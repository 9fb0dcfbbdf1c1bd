"""1/scale, by which gradients are unscaled."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor


class Reciprocal:
    """1/scale, 0-d float32, rounded once from float64 as torch does; not to be written into.

    Of a scale on a CPU, where looking at it costs less, it is made anew only when that has changed.
    """

    def __init__(self) -> None:
        self._scale = nan
        self._made: Tensor | None = None

    def __call__(self, scale: Tensor) -> Tensor:
        if scale.device.type != "cpu":
            return _reciprocal(scale)
        value = scale.item()
        if self._made is None or value != self._scale:
            with torch.inference_mode(False):  # it may be used outside later
                self._scale, self._made = value, _reciprocal(scale)
        return self._made


def _reciprocal(scale: Tensor) -> Tensor:
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
