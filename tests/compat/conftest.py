from __future__ import annotations

from collections.abc import Iterator

import pytest

import preamp
from preamp.compat.apex import amp


@pytest.fixture(autouse=True)
def amp_is_closed() -> Iterator[None]:
    """Amp is global: whatever a test did, the next finds torch as it was."""
    yield
    amp.close()


@pytest.fixture
def installed_as_apex() -> Iterator[None]:
    """`import apex` finds preamp's."""
    preamp.install_as_apex()
    yield
    preamp.uninstall_as_apex()
