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


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_DEVICE and item.path.stem in KERNEL_FILES:
            item.add_marker(pytest.mark.gpu)
