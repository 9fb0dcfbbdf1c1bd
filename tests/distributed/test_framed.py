"""Lightning Fabric and Accelerate hand out objects of their own: a session finds what is behind them."""

from __future__ import annotations

from typing import Any

import pytest

from .framed import LEVELS, MAKERS, ORDERS

pytestmark = pytest.mark.slow  # several processes train for half a minute


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("framework", ["Fabric", "Accelerate"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_framework_around_a_session(
    told: list[dict[str, Any]], level: str, maker: str, framework: str, order: str
) -> None:
    for each in told:
        alone, seen = each[f"{level} {maker}"], each[f"{level} {maker} {framework} {order}"]
        assert seen["wrapped"] and seen["skips"] == alone["skips"] == [False, False, False, True, False]
        assert seen["weights"] == alone["weights"]
