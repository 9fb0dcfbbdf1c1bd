"""Exports: the float32 model as safetensors, from masters where there are masters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.errors import CheckpointError, MissingExtra

from ..session.toys import loss_of
from .runs import LEVELS, OPTIMIZERS, Run

safetensors = pytest.importorskip("safetensors.torch")
export = preamp.checkpoint.export


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", [*LEVELS, "O0", "O3"])
def test_a_session_exports_its_masters(level: str, kind: str, tmp_path: Path) -> None:
    path, run = tmp_path / "m.safetensors", Run(level, kind, **({"scale": 128.0} if level == "O3" else {}))
    run.model.register_buffer("table", torch.arange(3))
    run.steps(0, 1, 2)
    with run.session.full_precision():
        wanted = {name: value.clone() for name, value in run.model.state_dict().items()}
    masters = run.session.state_dict()["masters"]
    before = run.state()
    export(path, run.session)
    got = safetensors.load_file(path)
    export(path, run.model)
    assert equal(got, wanted) and equal(got, safetensors.load_file(path))
    assert all(torch.equal(got[name], master) for name, master in masters.items())
    assert {value.dtype for name, value in got.items() if name != "table"} == {torch.float32}
    assert str(run.state()) == str(before) and os.listdir(tmp_path) == ["m.safetensors"]
    plain = Run("O0", seed=9)
    plain.model.register_buffer("table", torch.zeros(3, dtype=torch.long))
    plain.model.load_state_dict(got)


def test_split_masters_and_low_buffers_keep_their_bits(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.register_buffer("table", torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + self.table)

    model, path = Net(), tmp_path / "m.safetensors"
    table = model.table.clone()
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2, master="split")
    with preamp.prepare(model, optimizer, level="O5") as session:
        session.backward(loss_of(model, 0))
        session.step()
        assert model.table.dtype is torch.float32, "which 16 bits would round"
        export(path, session)
        got = safetensors.load_file(path)
        assert torch.equal(got["table"], table)
        assert torch.equal(got["linear.weight"], session.state_dict()["masters"]["linear.weight"])
        assert not torch.equal(got["linear.weight"], model.linear.weight.float())


@pytest.mark.parametrize("views", [False, True], ids=["tied", "views too"])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_tied_weights_and_overlapping_views(level: str, views: bool, tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, views: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight
            store = torch.randn(3, 4)
            if views:
                self.register_buffer("left", store[:2])
                self.register_buffer("right", store[1:].t())

    model, path = Tied(views), tmp_path / "m.safetensors"
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level) as session:
        export(path, session)
        with session.full_precision():
            wanted = {name: value.clone() for name, value in model.state_dict().items()}
    got = safetensors.load_file(path)
    assert equal(got, {name: value for name, value in wanted.items() if name != "head.weight"})
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"head.weight": "embed.weight", "format": "pt"}
    fresh = Tied(views)
    if views:  # which safetensors' own reader refuses in a model, whatever is in the file
        assert fresh.load_state_dict(got, strict=False).missing_keys == ["head.weight"]
    else:
        safetensors.load_model(fresh, path)
    assert equal(fresh.state_dict(), wanted) and fresh.head.weight is fresh.embed.weight


def test_plain_wrapped_and_several_models(tmp_path: Path) -> None:
    path, model = tmp_path / "m.safetensors", nn.Linear(3, 2).half()
    for wrapped in (model, nn.DataParallel(model), torch.compile(model, backend="eager")):
        export(path, wrapped, metadata={"epoch": "3"})
        got = safetensors.load_file(path)
        assert equal(got, {name: value.float() for name, value in model.state_dict().items()})
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"epoch": "3", "format": "pt"}
    models = {"g": nn.Linear(3, 2), "d": nn.Linear(2, 1)}
    optimizer = torch.optim.SGD([p for m in models.values() for p in m.parameters()], 0.1)
    wanted = {f"{n}.{key}": value.clone() for n, m in models.items() for key, value in m.state_dict().items()}
    with preamp.prepare(models, optimizer, level="O2") as session:
        export(path, session)
        assert equal(safetensors.load_file(path), wanted)


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "m.safetensors", Run("O2")
    export(path, run.session)
    whole = path.read_bytes()
    run.session.backward(loss_of(run.model, 0))
    run.session.unscale_()
    export(path, run.session)
    assert path.read_bytes() == whole, "gradients that wait for a step are no hindrance"
    run.session.step()
    run.model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match="sparse is"):
        export(path, run.session)
    del run.model.sparse
    assert {p.dtype for p in run.model.parameters()} >= {torch.float16}

    from safetensors import SafetensorError

    def refuses(*_: Any, **__: Any) -> None:
        raise SafetensorError("no more room")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", refuses)
        with pytest.raises(CheckpointError, match="no more room"):
            export(path, run.session)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(MissingExtra, match=r"preamp\[export\]"):
            export(path, run.session)
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["m.safetensors"]
