"""A sharded run goes on with another number of ranks: the same bits are loaded, and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import CheckpointError, StateError

from .together import launch


def run(folder: Path, ranks: int, level: str, kind: str) -> dict[str, Any]:
    out = folder.parent / "told.json"
    ran = launch("reshard", ranks, str(folder), level, kind, str(out), timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, Any] = json.loads(out.read_text())
    return told


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("O2", "8bit"), ("O0", "torch"), ("O2", "preamp"), ("O4", "preamp"), ("O5", "torch"))
        ),
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


def _made(level: str = "O4", width: int = 4, *, steps: int = 1, make: Any = preamp.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, width)
    optimizer = make(model.parameters(), lr=1e-2, eps=1e-4)
    session = preamp.prepare(model, optimizer, level=level)
    made = {"model": model, "optimizer": optimizer, "session": session}
    for _ in range(steps):
        _backward(made)
        session.step()
        session.zero_grad()
    return made


def _backward(made: dict[str, Any]) -> None:
    with made["session"].autocast():
        loss = made["model"](torch.randn(2, 3)).float().mean()
    made["session"].backward(loss)


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


@pytest.mark.parametrize("make", [torch.optim.AdamW, preamp.optim.AdamW, preamp.optim.LAMB])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_masters_are_what_parameters_are_written_as(tmp_path: Path, level: str, make: Any) -> None:
    """And read back bit for bit, moments in float32 included; another level goes on from the same float32 values."""
    made = _made(level, make=make)
    with made["session"].full_precision():
        want = [p.detach().clone() for p in made["model"].parameters()]
    moments = [state["exp_avg"].clone() for state in made["optimizer"].state.values()]
    preamp.checkpoint.save_sharded(tmp_path / "run", **made)
    for _ in range(2):
        _backward(made)
        made["session"].step()
    assert not torch.equal(made["model"].weight.float(), want[0].to(made["model"].weight.dtype).float())
    preamp.checkpoint.load_sharded(tmp_path / "run", **made)
    fresh = _made(level, steps=0, make=make)
    for one in (made, fresh):
        preamp.checkpoint.load_sharded(tmp_path / "run", **one)
        with one["session"].full_precision():
            assert all(map(torch.equal, one["model"].parameters(), want))
        held = [state["exp_avg"] for state in one["optimizer"].state.values()]
        assert all(map(torch.equal, held, moments))
        assert all(a.dtype is b.dtype for a, b in zip(held, moments, strict=True))
        assert one["model"].weight.dtype is preamp.policy(level).params
        assert one["session"].steps == 1
        one["session"].close()
