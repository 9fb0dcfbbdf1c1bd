"""Sessions with two models, two optimizers and two losses under DistributedDataParallel and FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from .together import told_by


@pytest.mark.slow
def test_two_losses_on_two_ranks_train_as_on_one_process(tmp_path: Path) -> None:
    for told in told_by("rivals", 2, tmp_path):
        assert len(told) == 30 and {name: found for name, found in told.items() if found} == {}
