from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Prepared data go to a folder of this test session, never to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREAMP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
