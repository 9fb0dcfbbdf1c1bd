"""What a session reads before a step is what the step uses: a skip is named, and hooks may change gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import preamp
from preamp import optim

from .toys import weights


def test_a_skip_names_its_parameters_and_makes_no_states() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.SGD(model.parameters(), 1e-2, momentum=0.9, dampening=0.5)
    with preamp.prepare(model, optimizer, policy="O4") as session:
        for step in range(4):
            with session.autocast():
                loss = model(torch.ones(2, 4)).float().square().mean()
            session.backward(loss)
            if step in (0, 2):
                model[1].weight.grad[0, 0] = float("nan")
            report = session.step()
            session.zero_grad()
            assert report.skipped is (step in (0, 2))
            assert list(report.nonfinite) == (["1.weight"] if step in (0, 2) else [])
            assert bool(optimizer.state) is (step > 0)


@pytest.mark.parametrize("which", ["own", "other"])
def test_hooks_around_steps_may_change_gradients(which: str) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [optim.SGD(m.parameters(), 1.0) for m in models]
    with preamp.prepare(models, optimizers, policy="O0") as session:
        for turn in range(2):
            before = [w.clone() for w in weights(models[1])]
            session.backward(sum(m(torch.ones(1, 2)).sum() for m in models))

            def zero(*_: object) -> None:
                for p in models[1].parameters():
                    assert p.grad is not None
                    p.grad.zero_()

            handle = None
            if turn and which == "own":
                handle = optimizers[1].register_step_pre_hook(zero)
            elif turn:
                handle = optimizers[0].register_step_post_hook(zero)
            session.step()
            session.zero_grad()
            same = all(map(torch.equal, before, weights(models[1])))
            assert same is bool(turn)
            if handle is not None:
                handle.remove()
