"""With the emulator, tensors that tests make without saying where lie on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .where import EMULATED


@pytest.fixture(autouse=True)
def where_kernels_run() -> Iterator[None]:
    if not EMULATED:
        yield
        return
    with torch.device("cuda"):
        yield
