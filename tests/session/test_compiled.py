"""Forward and backward compiled whole under a session, for every level and optimizer of ours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import preamp

from .toys import batch, mlp


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_one_graph_and_the_same_training(level: str, backend: str) -> None:
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = mlp(norm=False)
        optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
        with preamp.prepare(model, optimizer, level=level, scale=256.0 if level in ("O1", "O2") else None) as session:

            def loss_of(x: Tensor, y: Tensor) -> Tensor:
                with session.autocast():
                    return F.cross_entropy(model(x).float(), y)  # noqa: B023

            run = torch.compile(loss_of, fullgraph=True, backend=backend) if compiled else loss_of
            losses = []
            for step in range(6):
                loss = run(*batch(step))
                session.backward(loss)
                session.clip_grad_norm_(1.0)
                assert not session.step().skipped
                session.zero_grad()
                losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-5 if backend != "inductor" else 2e-2)
