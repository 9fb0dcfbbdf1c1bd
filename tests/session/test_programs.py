"""What leaves a session as a whole: pickled models, and programs that torch makes of models."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.autocast import PRODUCTS
from preamp.errors import SessionError

from ..products import BY_FLOAT32, counted, cpu_that_multiplies
from ..rows import over

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8)).eval()


class Parted(nn.Module):
    """A model whose parts know it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.norm.__dict__["whole"] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def prepared(model: nn.Module, level: str) -> preamp.Session:
    return preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level)


X = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("level", LEVELS)
def test_a_pickled_model_can_be_called(level: str, tmp_path: Path) -> None:
    model = network()
    wanted = model(X)
    with prepared(model, level) as session:
        torch.save(model, tmp_path / "whole.pt")
        here = model(X)
        with session.full_precision():
            plain = pickle.loads(pickle.dumps(model))
            wide = model(X)
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert isinstance(loaded, nn.Sequential) and loaded(X).dtype is here.dtype
    assert torch.equal(loaded(X), here)
    again = pickle.loads(pickle.dumps(loaded))
    assert torch.equal(again(X), here)
    torch.testing.assert_close(loaded(X).float(), wanted, rtol=3e-2, atol=3e-2)
    assert [type(module) for module in plain.modules()] == [type(module) for module in network().modules()]
    assert torch.equal(plain(X), wide)
    prepared(plain, level).close()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_products_of_a_model_that_outlives_its_session_go_through_float32(level: str) -> None:
    with cpu_that_multiplies(BY_FLOAT32):
        model = network()
        with prepared(model, level):
            pickled = pickle.dumps(model)
        loaded = pickle.loads(pickled)
        assert not PRODUCTS._libraries
        with counted() as asked:
            loaded(X).float().sum().backward()
        assert asked and all(asked)
        del loaded
        gc.collect()
        assert not PRODUCTS._libraries


def test_a_model_is_pickled_with_its_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O5"):
        loaded, stepping = pickle.loads(pickle.dumps((model, optimizer)))
    assert all(map(lambda a, b: a is b, loaded.parameters(), stepping.param_groups[0]["params"]))


def test_parts_that_know_the_whole() -> None:
    model = Parted()
    with prepared(model, "O5"):
        loaded = pickle.loads(pickle.dumps(model))
        assert loaded.norm.whole is loaded and torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_copy_that_was_made_in_full_precision_is_plain(level: str) -> None:
    model = network()
    with prepared(model, level) as session:
        with session.full_precision():
            copied, wide = copy.deepcopy(model), model(X)
        assert [type(module) for module in copied.modules()] == [type(module) for module in network().modules()]
        programs: list[Any] = [torch.fx.symbolic_trace(copied), torch.jit.script(copied), torch.jit.trace(copied, X)]
        programs.append(torch.export.export(copied, (X,)).module())
        assert copied(X).dtype is torch.float32
    for program in programs:
        torch.testing.assert_close(program(X), wide)


@over(make=[torch.fx.symbolic_trace, torch.jit.script], full=[False, True], level=["O2", "O5"])
def test_programs_that_would_lose_casts_are_refused(make: Any, full: bool, level: str) -> None:
    model = network()
    with prepared(model, level) as session:
        outer = nn.Sequential(model)
        for each in (model, outer):
            if full:
                with session.full_precision(), pytest.raises(SessionError, match="deepcopy"):
                    make(each)
            else:
                with pytest.raises(SessionError, match="deepcopy"):
                    make(each)
        assert outer[0] is model
        with session.full_precision():
            make(copy.deepcopy(model))
    make(model)


@over(level=["O2", "O5"], strict=[False, True])
def test_a_program_exported_in_full_precision_runs_afterwards(level: str, strict: bool) -> None:
    model = network()
    with prepared(model, level) as session:
        with session.full_precision():
            exported = torch.export.export(model, (X,), strict=strict)
            inside, wide = exported.module(), model(X)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        for program in (inside, exported.module()):
            torch.testing.assert_close(program(X), wide)
        assert all(p.dtype is not torch.float32 for p in model[0].parameters())
    torch.testing.assert_close(exported.module()(X), wide)


@pytest.mark.parametrize("whose", ["layers", "model"])
def test_an_export_leaves_what_fx_traced_alone(whose: str) -> None:
    """A traced module has the model's own layers in it, or is the model: copies are for the program alone."""
    model = network()
    traced = torch.fx.symbolic_trace(model)
    with prepared(model if whose == "layers" else traced, "O5") as session:
        parameters = dict(model.named_parameters())
        with session.full_precision():
            torch.export.export(model, (X,))
        for each in (model, traced):
            assert all(parameters[name] is p for name, p in each.named_parameters())
