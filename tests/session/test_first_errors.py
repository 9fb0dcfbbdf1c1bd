"""What is said about the mistakes of the first hour: what was seen, why it hurts, what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import PolicyError, PreampWarning, SessionError

from .toys import batch, mlp


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), eps=1e-4)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


Prepare = Callable[[nn.Module], Any]

WRONG: dict[str, tuple[Prepare, type[Exception], str]] = {
    "a level that is none": (
        lambda m: preamp.prepare(m, adamw(m), level="O9"),
        PolicyError,
        r"there is no level 'O9'; the levels are O0, .*auto. What they are: preamp levels",
    ),
    "half a level": (
        lambda m: preamp.prepare(m, adamw(m), level="bf16"),
        PolicyError,
        r"there is no level 'bf16'; .* Write 'bf16-mixed' \(O4\) or 'bf16-master' \(O5\)$",
    ),
    "Lightning's name": (
        lambda m: preamp.prepare(m, adamw(m), level="16-mixed"),
        PolicyError,
        r"'fp16-mixed' \(O1\) or 'bf16-mixed' \(O4\)$",
    ),
    "the number of a level": (lambda m: preamp.prepare(m, adamw(m), level=2), PolicyError, r"got 2. Write 'O2'$"),
    "a dtype": (
        lambda m: preamp.prepare(m, adamw(m), level=torch.float16),
        PolicyError,
        r"got torch.float16. Write 'fp16-mixed' \(O1\) or 'fp16-master' \(O2\)",
    ),
    "an empty level": (
        lambda m: preamp.prepare(m, adamw(m), level=" "),
        PolicyError,
        r"Write 'O0' for that, or 'auto'",
    ),
    "Apex's argument": (
        lambda m: preamp.prepare(m, adamw(m), opt_level="O2"),
        PolicyError,
        r"no field 'opt_level'; .*Apex's opt_level is level= here",
    ),
    "a field nearly right": (lambda m: preamp.prepare(m, adamw(m), master=True), PolicyError, r"Write masters$"),
    "Apex's function": (lambda m: preamp.initialize(m), AttributeError, r"write preamp.prepare\(.*install_as_apex\(\)"),
    "no optimizer": (
        lambda m: preamp.prepare(m, level="O5"),
        SessionError,
        r"no optimizer: .*prepare\(model, None\) for inference",
    ),
    "parameters": (
        lambda m: preamp.prepare(m, m.parameters()),
        SessionError,
        r"is a generator. Make one first: optimizer = torch.optim.AdamW\(model.parameters\(\)\)",
    ),
    "a class": (
        lambda m: preamp.prepare(m, torch.optim.SGD),
        SessionError,
        r"is the class SGD. Make one first: optimizer = SGD\(",
    ),
    "a scheduler": (
        lambda m: preamp.prepare(m, torch.optim.lr_scheduler.StepLR(adamw(m), 1)),
        SessionError,
        r"is a StepLR. Give it the scheduler's optimizer",
    ),
    "the optimizer first": (
        lambda m: preamp.prepare(adamw(m), m),
        SessionError,
        r"is an AdamW. The model comes first: prepare\(model, optimizer\)",
    ),
    "a model on meta": (
        lambda m: preamp.prepare(x := on_meta(), adamw(x)),
        SessionError,
        r"the meta device: .* Write model.to_empty\(device=...\)",
    ),
    "a model without parameters": (
        lambda m: preamp.prepare(nn.ReLU(), adamw(m)),
        SessionError,
        r"the model \(ReLU\) has no parameters, and the AdamW has 6",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_said_about(mistake: str) -> None:
    make, kind, message = WRONG[mistake]
    with pytest.raises(kind, match=message):
        make(mlp())


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_model_in_float64_is_warned_of(level: str) -> None:
    model = mlp().double()
    with pytest.warns(PreampWarning, match=r"float64, .* Write model.float\(\)"):
        preamp.prepare(model, adamw(model), level=level).close()


def test_float64_where_it_is_meant_is_not() -> None:
    model = mlp().double()
    preamp.prepare(model, adamw(model), level="O0").close()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    preamp.prepare(model, adamw(model), level="O4").close()


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_session_that_is_unpacked_is_closed_and_told(level: str) -> None:
    model = mlp()
    optimizer = adamw(model)
    with pytest.raises(SessionError, match=r"session = preamp.prepare\(model, optimizer\), and go on"):
        model, optimizer = preamp.prepare(model, optimizer, level=level)
    with preamp.prepare(model, optimizer, level=level) as session:
        with session.autocast():
            loss = model(batch(0)[0]).float().sum()
        session.backward(loss)
        session.step()
        with pytest.raises(SessionError, match="in place"):
            list(session)
        session.zero_grad()  # training goes on
