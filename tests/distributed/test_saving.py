"""Checkpoints and exports of what no rank holds whole, on two ranks; a rank that fails is told of on both, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import CheckpointError


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["in_the_background"]
    assert seen["moved"] and seen["as when it was asked for"] and seen["goes on alike"] and seen["waited"]
    assert seen["steps"] == 3
    assert seen["generations"] == ["00000004", "latest"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_the_checkpoint_before_stays(
    told: list[dict[str, Any]], rank: int
) -> None:
    seen = told[rank]["one_that_fails"]
    for error in (seen["error"], seen["later"]):
        assert "No space left" in error
        assert error.startswith("OSError" if rank == 0 else "CheckpointError: the checkpoint was not written")
    assert seen["seconds"] < 30  # of the half hour that a rank waits for another
    assert seen["the one before"] and seen["generations"] == 1
    assert len(seen["warned"]) == 1 and seen["warned"][0].startswith("a checkpoint was not saved")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_is_not_shared_is_told_before_anything_is_written(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["one_that_fails"]
    assert "a folder that they share" in seen["not shared"]
    assert "no 'latest'" in seen["not there"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_export_is_the_gathered_model(told: list[dict[str, Any]], rank: int) -> None:
    seen = told[rank]["exported"]
    assert seen["O1"] and seen["O5"] and seen["tensor parallel"]  # bit for bit; tied weights once
    assert not seen["O1 goes on"] and not seen["O5 goes on"]
    assert seen["nowhere"].startswith("FileNotFoundError" if rank == 0 else "CheckpointError")


def test_one_process_without_a_group_writes_at_once(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = model.weight.detach().clone()
    pending = preamp.checkpoint.save_sharded_async(tmp_path / "run", model=model, optimizer=optimizer)
    assert pending.done()
    with torch.no_grad():
        model.weight.zero_()
    preamp.checkpoint.load_sharded(tmp_path / "run", model=model, optimizer=optimizer)
    assert torch.equal(model.weight, before)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises((OSError, CheckpointError), match="file"):
        preamp.checkpoint.save_sharded_async(tmp_path / "file", model=model, optimizer=optimizer)
