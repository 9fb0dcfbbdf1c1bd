"""A script's own random seeds, shifted by an offset, so that a run can be repeated with others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ._patches import Patches


class Seeds:
    """Adds `offset` to every whole seed that the script gives to Python, numpy or torch, and to torch's first one.

    Generators that the script makes for itself (`torch.Generator`, `random.Random`, `RandomState`) keep theirs.
    """

    def __init__(self, patches: Patches, offset: int) -> None:
        self._offset = offset
        self._inside = False
        if not offset:
            return
        torch.manual_seed(torch.initial_seed() + offset)
        for owner, name in (
            (torch, "manual_seed"), (torch.random, "manual_seed"), (torch.cuda, "manual_seed"),
            (torch.cuda, "manual_seed_all"), (random, "seed"), (np.random, "seed"), (np.random, "default_rng"),
        ):  # fmt: skip
            patches.wrap(owner, name, self._shifted)

    def _shifted(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # torch.manual_seed seeds the devices by functions that are wrapped too
            return original(*args, **kwargs)
        self._inside = True
        try:
            return original(*map(self._shift, args), **{name: self._shift(value) for name, value in kwargs.items()})
        finally:
            self._inside = False

    def _shift(self, seed: Any) -> Any:
        is_whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
        return int(seed) + self._offset if is_whole else seed
