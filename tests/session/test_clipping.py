"""Clipping by norm and by value: of true gradients, of one optimizer or of all, finite or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import preamp
from preamp.errors import SessionError

from ..rows import over
from .toys import backward, loss_of, mlp, same, step, weights


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("kind", ["norm", "norm, unscaled", "inf-norm", "inf-norm, unscaled", "value", "torch"])
def test_clipping_is_of_true_gradients(level: str, kind: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    reference = mlp()
    loss_of(reference, 0).backward()
    true = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    with preamp.prepare(model, optimizer, level=level, scale=1024.0) as session:
        backward(session, model, 0)
        seen: list[torch.Tensor] = []  # what a hook on the optimizer's step sees: true and clipped, always
        optimizer.register_step_pre_hook(
            lambda *_: seen.append(torch.cat([p.grad.detach().clone().flatten() for p in model.parameters()]))
        )
        if "norm" in kind and "unscaled" in kind:
            session.unscale_()
        if kind.startswith("norm"):
            norm = session.clip_grad_norm_(0.02)
            assert torch.allclose(norm, true, rtol=2e-2)
            assert float(session.clip_grad_norm_(0.01)) == pytest.approx(0.02, rel=1e-3)  # a second one sees the first
        elif kind.startswith("inf-norm"):
            session.clip_grad_norm_(0.001, norm_type=float("inf"))
        elif kind == "value":
            session.clip_grad_value_(0.001)
            assert max(float(p.grad.abs().max()) for p in model.parameters()) <= 0.001 + 1e-9
        else:
            session.unscale_()
            session.unscale_()  # idempotent
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert torch.allclose(norm, true, rtol=2e-2)
        before = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        report = session.step()
        assert report.grad_norm == pytest.approx(float(true), rel=2e-2) or kind == "torch"
        assert len(seen) == 1 and seen[0].dtype is torch.float32
        if kind.startswith("norm") or kind == "torch":
            assert float(seen[0].norm()) == pytest.approx(0.01, abs=1e-5)
        else:
            assert float(seen[0].abs().max()) == pytest.approx(0.001, abs=1e-5)
        after = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        if (kind.startswith("norm") or kind == "torch") and level in ("O0", "O1"):
            assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


@over(level=["O0", "O1", "O2", "O4", "O5"], bad=[float("inf"), float("nan")], true=[False, True])
def test_optimizers_that_were_clipped_together_skip_together(level: str, bad: float, true: bool) -> None:
    """Their common norm is not finite when one gradient is not; the others, shrunk by it, would be zeros or NaN."""
    for together in (True, False):
        models = {"a": mlp(), "b": mlp()}
        optimizers = {name: preamp.optim.Adam(each.parameters(), 1e-2) for name, each in models.items()}
        with preamp.prepare(models, optimizers, level=level) as session:
            with session.autocast():
                loss = torch.stack([loss_of(each, 0) for each in models.values()]).sum()
            session.backward(loss)
            spoiled = next(models["b"].parameters())
            assert spoiled.grad is not None
            spoiled.grad[0, 0] = bad
            before = {name: weights(each) for name, each in models.items()}
            if true:
                session.unscale_()
            norm = torch.stack([session.clip_grad_norm_(0.1, optimizer=o) for o in optimizers.values()]).sum()
            norm = session.clip_grad_norm_(0.1) if together else norm
            report = session.step()
            session.zero_grad()
            assert not bool(norm.isfinite()) and report.skipped and len(report.nonfinite) == 1
            assert same(weights(models["b"]), before["b"])
            assert same(weights(models["a"]), before["a"]) is together
            assert all(bool(weight.isfinite().all()) for weight in weights(models["a"]))


@over(level=["O1", "O2", "O4", "O5"], library=[torch.optim, preamp.optim],
      between=["values", "evaluation", "forward", "all"])  # fmt: skip
def test_what_comes_between_clipping_and_the_step_changes_nothing(level: str, library: Any, between: str) -> None:
    """However small the factor is: shrunk gradients need more than 16 bits until they are stepped."""

    def run(interrupted: bool) -> list[torch.Tensor]:
        model = mlp()
        optimizer = library.SGD(model.parameters(), 1e6)
        with preamp.prepare(model, optimizer, level=level, scale=1024.0 if level in ("O1", "O2") else None) as session:
            for index in range(3):
                backward(session, model, index)
                session.clip_grad_norm_(1e-8)
                if interrupted and between in ("forward", "all"):
                    with session.autocast():
                        loss_of(model, 9)
                if interrupted and between == "all":
                    session.unscale_()
                if interrupted and between != "forward":
                    with session.full_precision(values_only=between == "values"), torch.no_grad():
                        loss_of(model, 9) if between != "values" else None
                session.step()
                session.zero_grad()
        return weights(model)

    assert same(run(True), run(False))


@over(level=["O0", "O1", "O2", "O4", "O5"], library=[torch.optim, preamp.optim], clip=[False, True])
def test_a_true_gradient_that_is_made_non_finite_skips_the_step(level: str, library: Any, clip: bool) -> None:
    """As a mean over ranks is when one of them has met a NaN; also that of a parameter without a gradient here."""
    for place in (0, -1):
        model = mlp()
        name, spoiled = list(model.named_parameters())[place]
        optimizer = library.SGD(model.parameters(), 0.1, momentum=0.9)
        with preamp.prepare(model, optimizer, level=level) as session:
            backward(session, model, 0)
            spoiled.grad = spoiled.grad if place == 0 else None
            scale, before = session.loss_scale(), weights(model)
            session.unscale_()
            assert spoiled.dtype is torch.float32, "ranks with and without its gradient would exchange two dtypes"
            spoiled.grad = torch.full_like(spoiled, torch.nan)
            assert not (clip and bool(session.clip_grad_norm_(1.0).isfinite()))
            report = session.step()
            assert report.skipped and not math.isfinite(report.grad_norm)
            assert report.nonfinite == (name,)
            session.zero_grad()
            assert same(weights(model), before)
            assert session.loss_scale() == (scale / 2 if level in ("O1", "O2") else scale)
            step(session, model, 1)
            assert all(bool(weight.isfinite().all()) for weight in weights(model))


@pytest.mark.parametrize("limit", [-1.0, math.nan, None, "1.0", True, "parameters"])
def test_a_limit_is_a_number_that_is_not_negative(limit: Any) -> None:
    model = mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), level="O4") as session:
        backward(session, model, 0)
        for clip in (session.clip_grad_norm_, session.clip_grad_value_):
            with pytest.raises(SessionError, match=rf"a number of at least 0.*write session\.{clip.__name__}\(1\.0\)"):
                clip(model.parameters() if limit == "parameters" else limit)
        for taken in (torch.tensor(0.5), np.float32(0.5), 1, math.inf):
            assert float(session.clip_grad_norm_(taken)) > 0
        assert not session.step().skipped


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_limits_and_orders_that_torch_takes(level: str) -> None:
    norms, model = [], mlp()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.0), level, scale=8.0) as session:
        for most, order in ((0.5, float("inf")), (torch.tensor([0.5]), "inf")):
            backward(session, model, 0)
            norms.append(session.clip_grad_norm_(most, order))  # type: ignore[arg-type]
            session.step()
            session.zero_grad()
    assert norms[0] == norms[1] > 0
