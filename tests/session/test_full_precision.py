"""`full_precision()`: nested, interrupted, and what is done to parameters inside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp

from ..rows import over
from .toys import LEVELS, MASTER_LEVELS, backward, batch, loss_of, mlp, same, train, weights


def prepared(level: str) -> tuple[nn.Sequential, preamp.Session]:
    model = mlp()
    return model, preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level=level, scale=2.0)


@pytest.mark.parametrize("level", LEVELS)
def test_nested(level: str) -> None:
    model, session = prepared(level)
    with session, torch.no_grad(), session.full_precision():
        with session.full_precision():
            inner = model(batch(0)[0])
        assert inner.dtype is torch.float32
        assert torch.equal(model(batch(0)[0]), inner), "still inside of the outer one"
        with session.full_precision(values_only=True):
            pass
        assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_freezing_inside_lasts(level: str) -> None:
    model, session = prepared(level)
    with session:
        with session.full_precision():
            model[0].weight.requires_grad_(False)
        assert not model[0].weight.requires_grad and model[0].bias.requires_grad
        with session.full_precision():
            model[0].weight.requires_grad_(True)
        assert model[0].weight.requires_grad
        session.backward(session.autocast()(loss_of)(model, 0))
        session.unscale_()
        model[3].weight.requires_grad_(False)
        session.step()
        assert not model[3].weight.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_made_inside_do_not_reach_the_step(level: str) -> None:
    """Between two micro-batches, say for the sharpness of the loss."""

    def run(asks: bool) -> list[torch.Tensor]:
        model, session = prepared(level)
        with session:
            for i in range(2):
                backward(session, model, i, sync=i == 1)
                if asks:
                    with session.full_precision():
                        loss_of(model, 7).backward()
            session.step()
            return weights(model)

    assert same(run(True), run(False))


@over(level=[level for level in LEVELS if level != "O3"], master=["float32", "split", "split24"])
def test_between_forward_and_backward(level: str, master: str) -> None:
    """As an evaluation of a model in float32 in torch: weights that stay as they are, are not written."""
    if master != "float32" and level != "O5":
        return

    def run(asks: bool) -> list[torch.Tensor]:
        model = mlp()
        optimizer = preamp.optim.SGD(model.parameters(), 0.1)
        if master != "float32":
            optimizer = preamp.optim.AdamW(model.parameters(), 0.1, eps=1e-4, master=master)
        with preamp.prepare(model, optimizer, level=level, scale=2.0) as session:
            for step in range(2):
                with session.autocast():
                    loss = loss_of(model, step)
                    if asks:
                        with session.full_precision(), torch.no_grad():
                            loss_of(model, 5)
                    loss = loss + loss_of(model, step + 1)
                session.backward(loss)
                session.step()
                session.zero_grad()
            return weights(model)

    assert same(run(True), run(False))


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("where", ["full", "low"])
def test_an_interrupt_leaves_a_session_that_casts(level: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way in, or on the way out: what was left undone the next call undoes."""
    model, session = prepared(level)
    dtypes = [p.dtype for p in model.parameters()]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with session:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session._masters, where, interrupted)
            with session.full_precision():
                pass
        session.backward(loss_of(model, 0))
        assert not session.step().skipped and [p.dtype for p in model.parameters()] == dtypes


MAKERS: dict[str, Any] = {
    "torch": torch.optim.AdamW,
    "preamp": preamp.optim.AdamW,
    "split": partial(preamp.optim.AdamW, master="split"),
}


@over(kept=[(level, kind) for level in MASTER_LEVELS for kind in MAKERS if (level, kind) != ("O2", "split")],
      cast=["half", "bfloat16", "double", "float"])  # fmt: skip
def test_a_model_that_is_cast_inside_and_left_so(kept: tuple[str, str], cast: str) -> None:
    """To save its weights in another dtype, say: masters stay float32, and training goes on."""
    level, kind = kept
    model = mlp(norm=False)
    with preamp.prepare(model, MAKERS[kind](model.parameters(), 1e-3, eps=1e-4), level=level) as session:
        train(session, model, range(3))
        with session.full_precision(values_only=True):
            before = weights(model)
            getattr(model, cast)()
        with session.full_precision(values_only=True):
            for now, was in zip(model.parameters(), before, strict=True):
                assert now.dtype is torch.float32
                assert torch.equal(now, was) or (kind == "split" and torch.equal(now, getattr(was, cast)().float()))
        train(session, model, range(3))
    assert all(p.dtype is torch.float32 for p in model.parameters())
