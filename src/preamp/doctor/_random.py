"""The random generators that a training script draws from: Python's, numpy's, torch's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> tuple[Any, ...]:
    """Of Python, numpy, and torch on the CPU and on every GPU in use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = np.random.get_state() if "numpy.random" in sys.modules else None
    return random.getstate(), numpy, torch.get_rng_state(), cuda


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put back what `random_state` gave."""
    python, numpy, cpu, cuda = state
    random.setstate(python)
    if numpy is not None:
        np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


@contextmanager
def random_kept() -> Iterator[None]:
    """Draws inside are not missed by what comes after."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
