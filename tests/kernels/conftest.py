"""On a GPU or the emulator, tensors that tests of kernels make without saying where lie on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .where import KERNEL_FILES, ON_DEVICE


@pytest.fixture(autouse=True)
def where_kernels_run(request: pytest.FixtureRequest) -> Iterator[None]:
    if not ON_DEVICE or request.path.stem not in KERNEL_FILES:
        yield
        return
    with torch.device("cuda"):
        yield
