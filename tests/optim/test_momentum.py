"""Muon as torch's, Lion as its paper's, and both in one session."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import preamp
from preamp.errors import OptimizerError
from preamp.optim import Lion, Muon

from ..session.toys import same
from .gradients import run

BF16 = torch.bfloat16
SHAPES = [(8, 16), (16, 8), (8, 16), (5, 5), (3, 1)]


def made(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(5)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize(
    "arguments",
    [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.8}],
    ids=str,
)
def test_muon_is_torchs(arguments: dict[str, Any]) -> None:
    """The same moments bit for bit; products of bfloat16 matrices may be summed in another order."""
    params, twins = made(), made()
    ours, theirs = Muon(params, 0.02, **arguments), torch.optim.Muon(twins, 0.02, **arguments)
    run(ours, params, range(10)), run(theirs, twins, range(10))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-3)
        assert torch.equal(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"])
    swapped, back = Muon(made(), 1.0), torch.optim.Muon(made(), 1.0)
    swapped.load_state_dict(theirs.state_dict())
    back.load_state_dict(ours.state_dict())
    for one, other in ((swapped, theirs), (back, ours)):
        assert {name: one.param_groups[0][name] for name in theirs.defaults} == {
            name: other.param_groups[0][name] for name in theirs.defaults
        }
        mine, others = ([s["momentum_buffer"] for s in each.state_dict()["state"].values()] for each in (one, other))
        assert same(mine, others)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_a_region_of_torch_that_is_open_does_not_change_a_step(dtype: torch.dtype) -> None:
    params, twins = made(), made()
    ours, theirs = Muon(params, 0.02), Muon(twins, 0.02)
    run(ours, params, range(3))
    with torch.autocast("cpu", dtype):
        run(theirs, twins, range(3))
    assert same(params, twins)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("master", ["float32", "split", "split24"])
def test_a_master_that_torch_kept_is_not_the_weights(master: str) -> None:
    """Torch's Muon loads our state with its masters and does not step them: they would put old weights back."""
    params = made(BF16)
    ours = Muon(params, 0.02, master=master)
    run(ours, params, [0])
    theirs = torch.optim.Muon(params, 0.02)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    run(theirs, params, [1, 2])
    trained = [p.detach().clone() for p in params]
    again = Muon(params, 0.02, master=master)
    again.load_state_dict(theirs.state_dict())
    assert same(params, trained)
    run(again, params, [3])
    assert all((p - q).abs().max() < 0.2 for p, q in zip(params, trained, strict=True))


def test_an_empty_matrix_is_stepped() -> None:
    params = [Parameter(torch.ones(4, 0)), Parameter(torch.ones(0, 4))]
    run(Muon(params, 0.02), params, [0])


def test_lion_is_the_papers() -> None:
    """A step is `lr` along the sign of the blend, whatever its size; the gradient's size is in the moment only."""
    p = Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    optimizer = Lion([p], 0.5, betas=(0.75, 0.5), weight_decay=0.5)
    p.grad = torch.tensor([1e-8, -100.0, 0.0, 1.0])
    optimizer.step()
    assert p.tolist() == [0.25, 1.25, 0.75, 0.25]
    p.grad = torch.tensor([-1e-9, 40.0, 0.0, -0.1])
    optimizer.step()  # blends: 0.75 m + 0.25 g, where m is half of the first gradient
    assert p.tolist() == pytest.approx([0.25 * 0.75 - 0.5, 1.25 * 0.75 + 0.5, 0.75 * 0.75, 0.25 * 0.75 - 0.5])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_is_seen_in_the_weights(bad: float) -> None:
    """In torch the sign of NaN is 0: weights would stand still, and nobody would know."""
    p = Parameter(torch.ones(3))
    optimizer = Lion([p], 0.1)
    p.grad = torch.tensor([1.0, bad, 1.0])
    optimizer.step()
    assert p.isnan().tolist() == [False, True, False]


def test_what_muon_refuses() -> None:
    weight, bias = Parameter(torch.ones(2, 3)), Parameter(torch.ones(3))
    with pytest.raises(OptimizerError, match=r"shape \(3,\).*p.dim\(\) == 2.*AdamW"):
        Muon([weight, bias])
    optimizer = Muon([weight])
    with pytest.raises(OptimizerError, match="matrices"):
        optimizer.add_param_group({"params": [bias]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(OptimizerError, match="master=None"):
        Muon([weight], rounding="stochastic")


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def optimizers(model: nn.Module, master: str) -> list[torch.optim.Optimizer]:
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith("5")]
    others = [p for p in model.parameters() if all(p is not h for h in hidden)]
    return [Muon(hidden, 0.02, master=master), Lion(others, 5e-3, master=master)]


@pytest.mark.parametrize(
    ("level", "master"), [*((level, "float32") for level in ("O1", "O2", "O4", "O5")), ("O5", "split")]
)
def test_a_session_of_both(level: str, master: str) -> None:
    """It learns, a bad batch is skipped by both, and a resumed run goes on bit for bit."""
    torch.manual_seed(1)
    x, target = torch.randn(64, 6), torch.randn(6, 3)
    y = (x @ target).tanh()

    def train(session: Any, model: nn.Module, steps: range) -> list[float]:
        losses = []
        for step in steps:
            bad = step == 3
            with session.autocast():
                loss = nn.functional.mse_loss(model(x * torch.inf if bad else x).float(), y)
            session.backward(loss)
            assert session.step().skipped is bad
            session.zero_grad()
            losses.append(loss.item())
        return losses

    saved: list[Any] = []
    ends = []
    for _ in range(2):
        model = blocks()
        used = optimizers(model, master)
        with preamp.prepare(model, used, level=level) as session:
            parts = model, *used, session
            for part, state in zip(parts, saved, strict=False):
                part.load_state_dict(state)
            if not saved:
                losses = train(session, model, range(20))
                assert losses[-1] < 0.4 * losses[0]
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
            ahead = train(session, model, range(20, 24))
        ends.append((ahead, [p.detach() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0] and same(ends[0][1], ends[1][1])
