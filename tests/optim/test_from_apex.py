"""States that Apex's fused optimizers saved go on in `preamp.optim` where they stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp
from preamp.compat.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from preamp.errors import OptimizerError

Pair = tuple[Callable[..., Any], Callable[..., Any]]

PAIRS: dict[str, Pair] = {
    "AdamW": (lambda p: FusedAdam(p, 1e-2, weight_decay=0.1), lambda p: preamp.optim.AdamW(p, 1e-2)),
    "Adam": (
        lambda p: FusedAdam(p, 1e-2, adam_w_mode=False, weight_decay=0.1), lambda p: preamp.optim.Adam(p, 1e-2)
    ),
    "LAMB": (lambda p: FusedLAMB(p, 1e-2), lambda p: preamp.optim.LAMB(p, 1e-2)),
    "NovoGrad": (lambda p: FusedNovoGrad(p, 1e-2), lambda p: preamp.optim.NovoGrad(p, 1e-2)),
    "NovoGrad, largest": (
        lambda p: FusedNovoGrad(p, 1e-2, norm_type=0, init_zero=True), lambda p: preamp.optim.NovoGrad(p, 1e-2)
    ),
    "SGD": (lambda p: FusedSGD(p, 1e-2, momentum=0.9, nesterov=True), lambda p: preamp.optim.SGD(p, 1e-2)),
    "Adagrad": (lambda p: FusedAdagrad(p, 1e-2), lambda p: preamp.optim.Adagrad(p, 1e-2)),
}  # fmt: skip


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def saved(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A network after 20 steps of Apex's, its optimizer, and the state as a file gives it back."""
    model = network()
    optimizer = PAIRS[kind][0](model.parameters())
    steps(model, optimizer, 0, 20)
    return model, optimizer, copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize("kind", PAIRS)
def test_a_run_goes_on_where_apex_stopped(kind: str) -> None:
    model, theirs, state = saved(kind)
    mine = copy.deepcopy(model)
    ours = PAIRS[kind][1](mine.parameters())
    before = copy.deepcopy(state)
    ours.load_state_dict(state)
    assert repr(before) == repr(state), "what was given stays as it was"
    steps(model, theirs, 20, 30)
    steps(mine, ours, 20, 30)
    for a, b in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if "step" in theirs.param_groups[0]:
        assert {float(own["step"]) for own in ours.state.values()} == {30.0}
        assert "step" not in ours.param_groups[0]
    again = PAIRS[kind][1](copy.deepcopy(mine).parameters())
    again.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_inside_a_session_too(kind: str, level: str) -> None:
    model, theirs, state = saved(kind)
    mine = copy.deepcopy(model)
    ours = PAIRS[kind][1](mine.parameters())
    with preamp.prepare(mine, ours, level=level, scale=64.0) as session:
        ours.load_state_dict(state)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(20))
        with session.autocast():
            loss = (mine(x).float() - x[:, :2]).square().mean()
        session.backward(loss)
        assert not session.step().skipped
    start = [p.detach().clone() for p in model.parameters()]
    steps(model, theirs, 20, 21)
    for a, b, begun in zip(mine.parameters(), model.parameters(), start, strict=True):
        assert float((a - b).detach().norm()) <= 0.1 * float((b.detach() - begun).norm()) + 1e-6


def test_a_state_without_an_option_takes_the_optimizers_own() -> None:
    model = network()
    optimizer = preamp.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
    steps(model, optimizer, 0, 2)
    state = optimizer.state_dict()
    del state["param_groups"][0]["amsgrad"], state["param_groups"][0]["maximize"]
    other = preamp.optim.Adam(model.parameters(), 1e-3, amsgrad=True)
    other.load_state_dict(state)
    assert other.param_groups[0]["amsgrad"] is True and other.param_groups[0]["lr"] == 1e-2
    steps(model, other, 2, 4)


def test_what_means_something_else_is_refused_and_changes_nothing() -> None:
    model = network()
    optimizer = FusedAdam(model.parameters(), 1e-2, bias_correction=False)
    steps(model, optimizer, 0, 2)
    ours = preamp.optim.AdamW(model.parameters(), 1e-2)
    with pytest.raises(OptimizerError, match="bias_correction=False, and AdamW always corrects"):
        ours.load_state_dict(optimizer.state_dict())
    assert not ours.state

    _, _, state = saved("NovoGrad")
    state["param_groups"][0]["exp_avg_sq"] = [torch.ones(2), torch.ones(3)]
    novo = preamp.optim.NovoGrad(model.parameters(), 1e-2)
    with pytest.raises(OptimizerError, match=r"norms of 2 16-bit and 3 other .* the group has 0 and 6: whose they are"):
        novo.load_state_dict(state)
    assert not novo.state


def test_norms_of_a_half_model_and_of_parameters_that_never_had_a_gradient() -> None:
    def norms_of(optimizer: Any) -> list[Tensor]:
        return [own["norm"] for own in optimizer.state.values()]

    half = network().bfloat16()
    half[2].float()
    optimizer = preamp.optim.NovoGrad(half.parameters(), 1e-2)
    _, _, state = saved("NovoGrad")
    state["param_groups"][0]["exp_avg_sq"] = [torch.tensor([1.0, 2.0, 5.0, 6.0]), torch.tensor([3.0, 4.0])]
    optimizer.load_state_dict(state)
    assert torch.stack(norms_of(optimizer)).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

    _, _, state = saved("NovoGrad")
    del state["state"][2]
    state["param_groups"][0]["exp_avg_sq"] = [torch.empty(0), torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0])]
    optimizer = preamp.optim.NovoGrad(network().parameters(), 1e-2)
    optimizer.load_state_dict(state)
    assert torch.stack(norms_of(optimizer)).tolist() == [1.0, 2.0, 4.0, 5.0, 6.0]
