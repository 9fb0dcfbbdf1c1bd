"""The random generators that a training script draws from: Python's, numpy's, torch's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

State = tuple[Any, ...]


def random_state(*, of_all: bool = True) -> State:
    """Of torch on the CPU and on every GPU in use; with `of_all`, of Python and numpy too, which takes far longer."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    python, numpy = _others() if of_all else (None, None)
    return python, numpy, torch.get_rng_state(), cuda


def others_drew(before: State) -> bool:
    """Whether Python's or numpy's generator moved since a state of all was taken."""
    python, numpy = _others()
    same = numpy is None or before[1] is None or (numpy[2:] == before[1][2:] and bool((numpy[1] == before[1][1]).all()))
    return not same or python != before[0]


def _others() -> tuple[Any, Any]:
    numpy: Any = np.random.get_state() if "numpy.random" in sys.modules else None
    return random.getstate(), numpy


def set_random_state(state: State) -> None:
    """Put back what `random_state` gave."""
    python, numpy, cpu, cuda = state
    if python is not None:
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
