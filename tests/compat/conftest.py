from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import preamp
from preamp.compat.apex import amp


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every `amp.initialize` says that Apex has deprecated it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::preamp.compat.apex.DeprecatedFeatureWarning"), False)


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
