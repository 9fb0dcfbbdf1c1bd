"""A training step as one CUDA graph trains as the step that was written."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.counting import launches
from torch import Tensor, nn
from torch.optim import Optimizer

import preamp
from preamp.errors import SessionError

from .training import CASES, EPS, MAKERS, OPTIMIZERS, STEPS, batch, network, no_waiting, scaled, spoiled, train_step

pytestmark = pytest.mark.gpu


class Run:
    """A training run, captured or not: losses, parameters, skips and scale."""

    def __init__(
        self, level: str, maker: Callable[[Any], Optimizer], captured: bool, *, bad: tuple[int, ...] = (),
        schedule: bool = False, between: Callable[[preamp.Session, nn.Module, int], None] | None = None,
    ) -> None:  # fmt: skip
        model = network()
        optimizer = maker(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)) if schedule else None
        losses = []
        with preamp.prepare(model, optimizer, level=level, **scaled(level)) as session:
            step: Any = train_step(model, session)
            if captured:
                step = session.capture(step)
            for index in range(STEPS):
                losses.append(step(*spoiled(index, bad)).clone())
                if scheduler is not None:
                    scheduler.step()
                if between is not None:
                    between(session, model, index)
            if captured:
                assert step.captured
            self.losses = torch.stack(losses).float()
            self.steps, self.skipped, self.scale = session.steps, session.skipped, session.loss_scale()
            report = session.last_step
            assert report is not None
            self.report = (report.index, report.skipped, report.scale)
        self.parameters = [p.detach().clone() for p in model.parameters()]
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def is_that_of(self, other: Run) -> None:
        # products may be made by another algorithm in a graph, so not to the bit
        torch.testing.assert_close(self.losses, other.losses, rtol=2e-3, atol=2e-3, equal_nan=True)
        for ours, theirs in zip(self.parameters, other.parameters, strict=True):
            assert torch.isfinite(ours).all()
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=3e-3)
        assert (self.steps, self.skipped, self.scale) == (other.steps, other.skipped, other.scale)
        assert self.report == other.report
        assert self.rates == pytest.approx(other.rates) and all(isinstance(rate, float) for rate in self.rates)


@pytest.mark.parametrize(("level", "name"), CASES)
def test_a_captured_step_trains_as_the_written_one(level: str, name: str) -> None:
    """With steps that are skipped, and a rate that changes at each."""
    captured, written = (Run(level, MAKERS[name], how, bad=(9, 15), schedule=True) for how in (True, False))
    captured.is_that_of(written)
    assert captured.skipped == 2 and captured.scale == (2.0**8 if level in ("O1", "O2") else 1.0)
    plain = Run(level, MAKERS[name], True)
    assert float(plain.losses[-1]) < float(plain.losses[0])
    assert any(not torch.equal(a, b) for a, b in zip(captured.parameters, plain.parameters, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_validating_in_full_precision_between_captured_steps_changes_nothing(level: str) -> None:
    seen: list[Tensor] = []

    def validate(session: preamp.Session, model: nn.Module, index: int) -> None:
        if index % 5 == 4:
            with session.full_precision(), torch.no_grad():
                seen.append(F.cross_entropy(model(batch(1000)[0]), batch(1000)[1]))

    maker = OPTIMIZERS["preamp.optim.AdamW"]
    captured, plain = Run(level, maker, True, between=validate), Run(level, maker, True)
    captured.is_that_of(plain)
    assert all(loss.dtype is torch.float32 and torch.isfinite(loss) for loss in seen)


def test_a_changed_hyperparameter_is_captured_anew() -> None:
    def stop(session: preamp.Session, model: nn.Module, index: int) -> None:
        if index == 11:
            for group in session.optimizers[""].param_groups:
                group["weight_decay"] = 0.5

    maker = OPTIMIZERS["preamp.optim.AdamW"]
    captured, written, plain = (
        Run("O2", maker, True, between=stop), Run("O2", maker, False, between=stop), Run("O2", maker, True)
    )  # fmt: skip
    captured.is_that_of(written)
    largest = max(float((a - b).abs().max()) for a, b in zip(captured.parameters, plain.parameters, strict=True))
    assert largest > 1e-4


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("through", ["cpu", "cuda"])
def test_states_loaded_between_captured_steps_are_trained_on(level: str, through: str) -> None:
    """A graph knows tensors by where they lie, and loaded states lie elsewhere; a rate may come from the host."""

    def load(session: preamp.Session, model: nn.Module, index: int) -> None:
        if index in (5, 12):
            optimizer, file = session.optimizers[""], io.BytesIO()
            torch.save([each.state_dict() for each in (model, optimizer, session)], file)
            file.seek(0)
            states = torch.load(file, weights_only=True, map_location=through)
            for each, state in zip((model, optimizer, session), states, strict=True):
                each.load_state_dict(state)

    maker = OPTIMIZERS["preamp.optim.AdamW"]
    captured, written = (Run(level, maker, how, bad=(9, 14), schedule=True, between=load) for how in (True, False))
    captured.is_that_of(written)
    assert captured.skipped == 2


def forget_kernels() -> None:
    """Let Triton load kernels as if no test before had launched them."""
    triton = pytest.importorskip("triton")
    from preamp.kernels.triton import eight_bit, elementwise, launch, read

    for module in (eight_bit, elementwise, launch, read):
        for each in vars(module).values():
            if isinstance(each, triton.runtime.JITFunction):
                each.device_caches.clear()


@pytest.mark.parametrize("maker", [
    lambda p, decay: preamp.optim.AdamW(p, 3e-3, eps=EPS, weight_decay=decay),
    lambda p, decay: preamp.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=decay),
    lambda p, decay: preamp.optim.LAMB(p, 3e-3, weight_decay=decay),
], ids=["AdamW", "SGD", "LAMB"])  # fmt: skip
def test_what_a_capture_launches_has_run_before(maker: Callable[[Any, float], Optimizer]) -> None:
    """Drivers load no kernel while a graph is captured: not the one with weight decay, nor one for later steps.

    Rates given as numbers make other kernels than rates in tensors, and a first step others than the second.
    """

    def change(session: preamp.Session, model: nn.Module, index: int) -> None:
        if index == 8:
            for group in session.optimizers[""].param_groups:
                group["weight_decay"] = 0.5

    forget_kernels()
    captured, written = (Run("O5", lambda p: maker(p, 0.0), how, between=change) for how in (True, False))
    captured.is_that_of(written)


def test_replays_do_not_wait() -> None:
    model = network()
    batches = [batch(step) for step in range(12)]
    with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level="O2") as session:
        step = session.capture(train_step(model, session))
        for x, y in batches[:6]:
            step(x, y)
        assert step.captured
        with no_waiting():
            for x, y in batches[6:]:
                step(x, y)


def test_a_replay_has_no_more_kernels_than_a_step() -> None:
    """What is done in the first steps only, as comparing parameters with masters, must not stay in the graph."""

    def settled(captured: bool) -> int:
        model = network()
        x, y = batch(0)
        with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level="O2") as session:
            step: Any = train_step(model, session)
            if captured:
                step = session.capture(step)
            for _ in range(8):
                step(x, y)
            torch.cuda.synchronize()
            found = launches(lambda: step(x, y))
            assert found is not None
            return found

    replayed, written = settled(True), settled(False)
    # copies of the two arguments, of the result, and of what a report keeps, and a rate in a tensor
    assert replayed <= written + 16, f"{replayed} kernels in a replay, {written} in a step as it is written"


@pytest.mark.parametrize(("clips", "most"), [(False, 4), (True, 6)])
def test_scaling_takes_four_launches_a_step(clips: bool, most: int) -> None:
    """Beside a step at scale 1: the reciprocal, the update and bounds of the scale, and its copy in the report.

    Clipping takes two more: the norm is unscaled, and what gradients are multiplied by is a product.
    """

    def settled(scale: Any) -> int:
        model = network()
        x, y = batch(0)
        with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level="O2", scale=scale) as session:

            def step() -> None:
                with session.autocast():
                    loss = F.cross_entropy(model(x), y)
                session.backward(loss)
                if clips:
                    session.clip_grad_norm_(1.0)
                session.step()
                session.zero_grad(set_to_none=False)  # new addresses would be sent to the device

            for _ in range(8):
                step()
            torch.cuda.synchronize()
            found = launches(step)
            assert found is not None
            return found

    scaled, plain = settled("dynamic"), settled(1)
    assert scaled <= plain + most, f"{scaled} kernels in a step with a scale, {plain} in one without"


def test_other_shapes_are_refused_and_change_nothing() -> None:
    model = network()
    with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level="O2") as session:
        step = session.capture(train_step(model, session))
        for index in range(6):
            step(*batch(index))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(SessionError, match="drop or pad the last batch"):
            step(*batch(6, size=100))
        with pytest.raises(SessionError, match="2 tensors, and this call gives 1"):
            step(batch(6)[0])
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        step(*batch(6))
        assert session.steps == 7
        step.reset()
        step(*batch(7, size=100))
        assert session.steps == 8 and torch.isfinite(step(*batch(8, size=100)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_needs_the_host_is_refused(level: str) -> None:
    model = network()
    with preamp.prepare(model, torch.optim.Adagrad(model.parameters()), level=level) as session:
        step = session.capture(train_step(model, session), warmup=2)
        for index in range(2):
            step(*batch(index))
        with pytest.raises(SessionError, match="Adagrad cannot step inside a graph"):
            step(*batch(2))


def test_an_optimizer_that_is_put_back_on_the_device_may_be_captured() -> None:
    def maker(parameters: Any) -> Optimizer:
        return torch.optim.NAdam(parameters, 3e-3, eps=EPS, capturable=True)

    captured, written = (Run("O1", maker, how, bad=(9,)) for how in (True, False))
    captured.is_that_of(written)


def test_a_function_without_a_step_is_refused() -> None:
    model = network()
    with preamp.prepare(model, preamp.optim.AdamW(model.parameters()), level="O5") as session:
        step = session.capture(lambda x: model(x).sum(), warmup=1)
        step(batch(0)[0])
        with pytest.raises(SessionError, match=r"takes no session\.step"):
            step(batch(1)[0])
