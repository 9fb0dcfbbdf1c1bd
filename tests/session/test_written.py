"""Weights that user code writes or removes during training: what was written wins, at every level."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import preamp
from preamp.errors import PreampWarning, SessionError

from ..rows import over
from .toys import MASTER_LEVELS, backward, loss_of, mlp

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda p: torch.optim.SGD(p, 0.1),
    "preamp": lambda p: preamp.optim.SGD(p, 0.1),
    "split": lambda p: preamp.optim.AdamW(p, 0.01, master="split"),
    "split24": lambda p: preamp.optim.AdamW(p, 0.01, master="split24"),
}


def trained(level: str, kind: str, steps: int) -> tuple[nn.Sequential, preamp.Session]:
    model = mlp()
    session = preamp.prepare(model, OPTIMIZERS[kind](model.parameters()), level=level, **scale_of(level))
    for step in range(steps):
        train(model, session, step)
    return model, session


def scale_of(level: str) -> dict[str, Any]:
    return {"scale": 256.0} if level in ("O1", "O2") else {}


def train(model: nn.Module, session: preamp.Session, step: int) -> None:
    session.zero_grad()
    backward(session, model, step)
    assert not session.step().skipped


def all_in(session: preamp.Session, model: nn.Module) -> dict[str, list[Tensor]]:
    """The weights, by each way out of a session."""
    ways = {"state": list(session.state_dict()["masters"].values())}
    with session.full_precision():
        ways["full"] = [p.detach().clone() for p in model.parameters() if p.dim() > 1]
    session.close()
    ways["closed"] = [p.detach().clone() for p in model.parameters() if p.dim() > 1]
    ways["state"] = [master.clone() for master in ways["state"] if master.dim() > 1]
    return ways


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data.copy_": lambda p: p.data.copy_(torch.full_like(p, 0.75)),
    "data index": lambda p: p.data.__setitem__(0, 0.75),
    "data.mul_": lambda p: p.data.mul_(1.5),
    "detached view": lambda p: p.detach().data.view(-1).fill_(0.75),
    "nan": lambda p: p.data.fill_(float("nan")),
}


@over(level=MASTER_LEVELS, kind=["torch", "preamp"], steps=[0, 2, 6], write=WRITES)
def test_what_was_written_is_in_every_way_out(level: str, kind: str, steps: int, write: str) -> None:
    """As a late `nn.init` of `.data` does: full_precision() would put the former weights back."""
    model, session = trained(level, kind, steps)
    for parameter in model.parameters():
        WRITES[write](parameter)
    wanted = [p.detach().float() for p in model.parameters() if p.dim() > 1]
    with pytest.warns(PreampWarning, match=r"through \.data"):
        ways = all_in(session, model)
    for values in ways.values():
        for value, want in zip(values, wanted, strict=True):
            torch.testing.assert_close(value.to(torch.bfloat16), want.to(torch.bfloat16), equal_nan=True)


@over(level=["O1", "O4", *MASTER_LEVELS], kind=list(OPTIMIZERS))
def test_a_whole_model_that_is_written_once_trains_on_from_there(level: str, kind: str) -> None:
    if "split" in kind and level == "O2":
        pytest.skip("split masters are of bfloat16")
    model, session = trained(level, kind, 9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, session, 9)
        session.close()
    for parameter in model.parameters():
        assert (parameter - 0.5).abs().max() < 0.2, "the step began where the weights were written"


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_vectors_of_parameters(level: str) -> None:
    """As Reptile and populations write them: `vector_to_parameters` gives parameters other, float32, memory."""
    model, session = trained(level, "torch", 6)
    with session.full_precision(values_only=True):
        start = parameters_to_vector(model.parameters()).clone()
    vector_to_parameters(start * 0.5, model.parameters())
    train(model, session, 6)
    with session.full_precision(values_only=True):
        now = parameters_to_vector(model.parameters())
    assert (now - start * 0.5).norm() < 0.2 * start.norm()
    session.close()


@pytest.mark.parametrize("level", ["O1", "O4", *MASTER_LEVELS])
def test_a_mask_that_is_set_after_each_step_holds(level: str) -> None:
    model, session = trained(level, "torch", 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(5, 9):
            train(model, session, step)
            model[0].weight.data[0] = 0
        with session.full_precision():
            assert not model[0].weight[0].any()
        session.close()
    assert not model[0].weight[0].any()


@pytest.mark.parametrize("level", ["O0", "O1", "O4", *MASTER_LEVELS])
def test_what_is_removed_is_let_go(level: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.register_buffer("table", torch.tensor([1.0, 0.5]))
    prune.random_unstructured(model[0], "weight", 0.5)
    kinds = [type(module) for module in model]
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, **scale_of(level))
    train(model, session, 0)
    prune.remove(model[0], "weight")
    del model.table
    train(model, session, 1)
    with session.full_precision():
        assert not {p.dtype for p in model.parameters()} - {torch.float32}
        assert loss_of(model, 2).isfinite()
    state = session.state_dict()
    assert set(state["masters"]) <= dict(model.named_parameters()).keys()
    session.load_state_dict(state)
    train(model, session, 2)
    session.close()
    assert [type(module) for module in model] == kinds
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@over(level=["O0", "O1", "O4"], dtype=[torch.float16, torch.bfloat16], part=["all", "last"])
def test_a_model_that_is_cast_during_a_session_of_float32_weights_is_told(
    level: str, dtype: torch.dtype, part: str
) -> None:
    model, session = trained(level, "torch", 1)
    (model if part == "all" else model[-1]).to(dtype)
    session.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    with session.autocast():
        x = torch.randn(8, 6, dtype=dtype if part == "all" and level == "O0" else torch.float32)
        hidden = model[:-1](x)
        loss = model[-1](hidden.to(model[-1].weight.dtype)).float().square().mean()
    with pytest.raises(SessionError, match=r"cast to (fp16|bf16) after prepare"):
        session.backward(loss)
        session.step()
    assert all(map(torch.equal, before, model.parameters()))
    session.close()


@pytest.mark.parametrize("level", ["O1", "O4", "O5"])
def test_a_region_that_goes_on_after_backward_sees_what_was_written_since(level: str) -> None:
    """As SAM writes, where a framework has one region around forward, backward and step."""
    model = mlp()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, **scale_of(level))
    with session.autocast():
        session.backward(loss_of(model, 0))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        inside = loss_of(model, 0)
    with session.autocast():
        assert torch.equal(loss_of(model, 0), inside)
    session.close()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@over(kind=OPTIMIZERS, inside=[True, False])
def test_an_embedding_is_resized_by_its_data(level: str, kind: str, inside: bool) -> None:
    """As transformers does: `old.weight.data = new.weight.data`. The step, the end of the block and close() failed."""
    if level != "O5" and kind.startswith("split"):
        pytest.skip("split masters are for bfloat16")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 3))
    weight, optimizer = model[0].weight, OPTIMIZERS[kind](model.parameters())
    session = preamp.prepare(model, optimizer, level=level, **scale_of(level))
    x = torch.arange(4)

    def step() -> None:
        with session.autocast():
            loss = model(x).float().square().mean()
        session.backward(loss)
        assert not session.step().skipped
        session.zero_grad()

    for rows in (9, 4):
        step()
        with session.full_precision(values_only=True) if inside else nullcontext():
            right = torch.cat([weight.detach(), torch.randn(9, 6).to(weight.dtype)])[:rows]
            weight.data = right.clone()
        optimizer.state.pop(weight, None)
        low = weight.detach().clone()
        assert torch.equal(low, right.to(low.dtype))
        with session.full_precision():
            if session.policy.masters:
                torch.testing.assert_close(weight.detach(), right.float(), rtol=2**-16 if inside else 0.0, atol=0.0)
            assert model(torch.tensor([rows - 1])).shape == (1, 3)
        x = torch.tensor([rows - 1])
        step()
        changed = (weight.detach() != low).any(1)
        assert changed[-1] and (kind != "torch" or not changed[:-1].any())
    session.close()
    assert weight.dtype is torch.float32 and weight.shape == (4, 6)
