"""An evaluation leaves FSDP2's root gathered; whatever follows it finds the shards all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .gathered import LEVELS
from .together import told_by

pytestmark = pytest.mark.slow  # processes of their own; `test_parted` and `test_sharded` are always run


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gathered")
    return told_by("gathered", 2, folder)


@pytest.mark.parametrize("kind", ["torch", "preamp"])
@pytest.mark.parametrize("level", LEVELS)
def test_an_evaluation_changes_nothing(told: list[dict[str, Any]], level: str, kind: str) -> None:
    for one in told:
        seen = one[f"{level} {kind}"]
        assert seen["gathered"], "the model was not gathered, so this shows nothing"
        assert seen["same"] and seen["dtypes"] == ["torch.float32"]
        assert seen["names"] == ["2.weight"]
        assert seen["runs"] is (level == "O0"), "what is gathered in 16 bits does not run in float32"
