"""Every test of the doctor leaves torch as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode


@pytest.fixture(autouse=True)
def _no_mode_stays() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode() is None
