"""After a session, and after one that could not begin, torch, model and optimizer are what they were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.errors import PolicyError, PreampWarning

from .toys import LEVELS, mlp, step

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda params: torch.optim.Adam(params, 1e-3, eps=1e-4),
    "preamp": lambda params: preamp.optim.Adam(params, 1e-3, eps=1e-4),
}


def seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return (
        list(map(type, model.modules())),
        [(p.dtype, p.data_ptr(), p._post_accumulate_grad_hooks) for p in model.parameters()],
        [id(b) for b in model.buffers()],
        len(optimizer._optimizer_load_state_dict_pre_hooks),
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_rules_that_another_session_forbids(level: str, kind: str) -> None:
    other = mlp()
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = seen(model, optimizer)
    with preamp.prepare(other, torch.optim.SGD(other.parameters(), 0.1), "O4"):
        with pytest.raises(PolicyError, match="whole process"):
            preamp.prepare(model, optimizer, policy=f"{level}; op softmax -> low")
        assert seen(model, optimizer) == before
    with preamp.prepare(model, optimizer, policy=f"{level}; op softmax -> low", scale=8.0) as session:
        assert not step(session, model, 0).skipped


@pytest.mark.parametrize("level", ["O1", "O3", "O4", "O5"])
def test_a_warning_of_prepare_that_is_an_error(level: str) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-50)
    before = seen(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PreampWarning, match="rounds to zero"):
            preamp.prepare(model, optimizer, level)
    assert seen(model, optimizer) == before
    with pytest.warns(PreampWarning, match="rounds to zero"):
        preamp.prepare(model, optimizer, level).close()


class LowMomentum(torch.optim.Optimizer):
    """Keeps its momentum in bfloat16, whatever its parameters are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param, dtype=torch.bfloat16))
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=0.1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_states_that_an_optimizer_keeps_in_a_dtype_of_its_own(level: str) -> None:
    model = mlp()
    optimizer = LowMomentum(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with preamp.prepare(model, optimizer, level) as session:
        step(session, model, 0)
        assert {state["momentum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    assert {state["momentum"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
