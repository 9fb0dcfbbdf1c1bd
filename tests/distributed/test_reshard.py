"""A sharded run goes on with another number of ranks: the same bits are loaded, and trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import CheckpointError, StateError

SCRIPT = Path(__file__).with_name("reshard.py")


def run(folder: Path, ranks: int, level: str, kind: str) -> dict[str, Any]:
    out = folder.parent / "told.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
    ran = subprocess.run([*line, str(folder), level, kind, str(out)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        ("O2", "preamp"),
        ("O5", "8bit"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("O0", "torch"), ("O4", "preamp"), ("O5", "torch"))),
    ],
)
def test_four_ranks_then_two_then_three(tmp_path: Path, level: str, kind: str) -> None:
    folder = tmp_path / "run"
    saved = None
    for ranks in (4, 2, 3):
        told = run(folder, ranks, level, kind)
        assert told["loaded"] == saved  # parameters, moments, scale, counters: every bit
        assert told["as from the whole"] is (None if saved is None else True)
        assert told["skipped"] == 1
        saved = told["saved"]
    assert told["scale"] == (2.0**15 if level == "O2" else 1.0)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["00000003"]


def _made(level: str = "O4", width: int = 4) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, width)
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-2)
    session = preamp.prepare(model, optimizer, level=level)
    session.backward(model(torch.randn(2, 3)).float().mean())
    session.step()
    session.zero_grad()
    return {"model": model, "optimizer": optimizer, "session": session}


def test_one_process_saves_and_loads_too(tmp_path: Path) -> None:
    made = _made()
    preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    want = {name: value.clone() for name, value in made["model"].state_dict().items()}
    made["session"].backward(made["model"](torch.randn(2, 3)).float().mean())
    made["session"].step()
    assert not torch.equal(made["model"].weight, want["weight"])
    preamp.checkpoint.load_sharded(tmp_path / "run", **made)
    assert all(torch.equal(value, want[name]) for name, value in made["model"].state_dict().items())
    assert made["session"].steps == 1
    made["session"].close()


def test_what_does_not_fit_is_told_and_nothing_is_loaded(tmp_path: Path) -> None:
    made = _made()
    with pytest.raises(CheckpointError, match="no 'latest'"):
        preamp.checkpoint.load_sharded(tmp_path / "none", **made)
    preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    made["session"].close()
    wide = _made(width=5)
    before = wide["model"].weight.detach().clone()
    with pytest.raises(CheckpointError, match="nothing was"):
        preamp.checkpoint.load_sharded(tmp_path / "run", **wide)
    assert torch.equal(wide["model"].weight, before)
    wide["session"].close()
    other = _made("O0")
    before = other["model"].weight.detach().clone()
    with pytest.raises(StateError, match="policy"):
        preamp.checkpoint.load_sharded(tmp_path / "run", **other)
    assert torch.equal(other["model"].weight, before)
    other["session"].close()


def test_masters_that_every_rank_has_whole_are_not_sharded(tmp_path: Path) -> None:
    made = _made("O5")
    with pytest.raises(CheckpointError, match=r"checkpoint\.save on rank 0"):
        preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    assert not (tmp_path / "run").exists()
    made["session"].close()


def test_a_save_that_was_killed_leaves_the_one_before(tmp_path: Path) -> None:
    made = _made()
    preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    (tmp_path / "run" / "00000002").mkdir()  # the next one, of which a rank wrote half
    (tmp_path / "run" / "00000002" / "__0_0.distcp").write_bytes(b"half")
    preamp.checkpoint.load_sharded(tmp_path / "run", **made)
    preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    preamp.checkpoint.load_sharded(tmp_path / "run", **made)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["00000002"]
    made["session"].close()
