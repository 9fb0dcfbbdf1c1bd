"""A sharded run goes on with another number of ranks: the same bits are loaded, and trained on."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import preamp
from preamp.errors import CheckpointError, StateError

from .together import tell, told_by

WHOLE = StateDictOptions(full_state_dict=True)


class Made:
    """A sharded model, its optimizer, its session."""

    def __init__(self, level: str, kind: str) -> None:
        policy = preamp.policy(level)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 9))
        fully_shard(self.model[0], mp_policy=policy.fsdp())
        fully_shard(self.model, mp_policy=policy.fsdp())
        make: Any = torch.optim.AdamW if kind == "torch" else preamp.optim.AdamW
        options: dict[str, Any] = {"states": "8bit"} if kind == "8bit" else {}
        self.optimizer = make(self.model.parameters(), lr=1e-2, **options)
        self.session = preamp.prepare(self.model, self.optimizer, level=level)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            torch.manual_seed(step)
            with self.session.autocast():
                loss = self.model(torch.randn(6, 8)).float().square().mean()
                loss = loss * torch.inf if step == 3 else loss
            self.session.backward(loss)
            self.session.clip_grad_norm_(0.5)
            self.session.step()
            self.session.zero_grad()

    def whole(self) -> dict[str, Any]:
        """Everything, on rank 0: parameters, states, scale, counters."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        return {"model": model, "optimizer": optimizer, "amp": self.session.state_dict()}

    def digest(self) -> str:
        digest = hashlib.sha256()

        def add(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}{value.tolist()}".encode())
            elif isinstance(value, dict):
                for key in sorted(value, key=str):
                    digest.update(str(key).encode())
                    add(value[key])
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                digest.update(repr(value).encode())

        add(self.whole())
        return digest.hexdigest()


def act(folder: Path) -> dict[str, Any]:
    (level, kind), shared, kept = sys.argv[2:4], folder / "run", folder / "whole.pt"
    made = Made(level, kind)
    parts: dict[str, Any] = {"model": made.model, "optimizer": made.optimizer, "session": made.session}
    told: dict[str, Any] = {"loaded": None, "as from the whole": None}
    first = 0
    if (shared / "latest").exists():
        preamp.checkpoint.load_sharded(shared, **parts)
        told["loaded"] = made.digest()
        first = made.session.steps
    made.train(first, first + 5)
    if first:  # the same steps of a run that got the whole state, by torch's own means
        other, whole = Made(level, kind), torch.load(kept, weights_only=False)
        set_state_dict(
            other.model, other.optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"],
            options=WHOLE,
        )  # fmt: skip
        other.session.load_state_dict(whole["amp"])
        other.train(first, first + 5)
        told["as from the whole"] = other.digest() == made.digest()
    preamp.checkpoint.save_sharded(shared, **parts)
    told["saved"] = made.digest()
    told["skipped"], told["scale"] = made.session.skipped, made.session.loss_scale()
    whole = made.whole()
    if dist.get_rank() == 0:
        torch.save(whole, kept)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "kind"), [("O2", "8bit"), ("O0", "torch"), ("O2", "preamp"), ("O4", "preamp"), ("O5", "torch")]
)
def test_four_ranks_then_two_then_three(tmp_path: Path, level: str, kind: str) -> None:
    saved = None
    for ranks in (4, 2, 3):
        told = told_by("test_reshard", ranks, tmp_path, level, kind)[0]
        assert told["loaded"] == saved  # parameters, moments, scale, counters: every bit
        assert told["as from the whole"] is (None if saved is None else True)
        assert told["skipped"] == 1
        saved = told["saved"]
    assert told["scale"] == (2.0**15 if level == "O2" else 1.0)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["preamp-00000003"]


def _made(level: str = "O4", width: int = 4) -> dict[str, Any]:
    model = nn.Linear(3, width)
    optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return {"model": model, "optimizer": optimizer, "session": preamp.prepare(model, optimizer, level=level)}


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


if __name__ == "__main__":
    tell(act)
