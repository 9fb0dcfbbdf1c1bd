"""A session and a scaler of the script's own, with what Lightning and Accelerate make of models and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp

from ..session.toys import LEVELS
from .loops import CLIP, MAKERS, MICRO, data, network, plain

L: Any = pytest.importorskip("lightning")
accelerate: Any = pytest.importorskip("accelerate")

STEPS = 6
"""Fewer than it takes to the batch that overflows."""
INPUTS = [x for x, _ in data()[:STEPS]]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def step(session: preamp.Session, model: nn.Module, index: int) -> None:
    """As `plain` takes it."""
    for x, y in data()[index * MICRO : (index + 1) * MICRO]:
        with session.autocast():
            predicted = model(x).float()
        session.backward(nn.functional.mse_loss(predicted, y) / MICRO)
    session.clip_grad_norm_(CLIP)
    session.step()
    session.zero_grad()


def assert_as_alone(model: nn.Module, level: str, maker: str, steps: int) -> None:
    alone = plain(level, maker, "session", steps=steps, scheduled=False)
    for (name, parameter), its in zip(model.named_parameters(), alone.parameters, strict=True):
        assert torch.equal(parameter, alone.state["masters"].get(name, its)), name


class Module(L.LightningModule):
    def __init__(self, level: str, maker: str, whole: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net, self.how = network(), (level, maker, whole)
        self.validated: list[torch.dtype] = []

    def configure_optimizers(self) -> Any:
        return MAKERS[self.how[1]](self.net.parameters())

    def on_fit_start(self) -> None:
        level, _, whole = self.how
        self.session = preamp.prepare(self if whole else self.net, self.optimizers(), level=level)

    def on_fit_end(self) -> None:
        self.session.close()

    def training_step(self, x: Tensor, index: int) -> None:
        step(self.session, self.net, self.session.steps)

    def validation_step(self, x: Tensor, index: int) -> None:
        with self.session.full_precision():
            self.validated.append(self.net(x).dtype)


@pytest.mark.parametrize(
    ("level", "whole", "maker"),
    [*((level, level in ("O1", "O5"), "preamp") for level in LEVELS), ("O2", True, "foreach"), ("O5", False, "fused")],
)  # at O3 there are no regions, and the module that is called has to be the one that casts
def test_a_trainer_counts_the_steps_of_a_session(level: str, whole: bool, maker: str) -> None:
    """By which it stops, too; and weights are those of a loop without it, bit for bit."""
    module = Module(level, maker, whole)
    quietly = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=9, max_steps=STEPS, accelerator="cpu", devices=1, enable_model_summary=False, **quietly
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(INPUTS[:size], batch_size=None) for size in (4, 2)]  # type: ignore[arg-type,var-annotated]
    trainer.fit(module, *loaders)
    assert trainer.global_step == STEPS
    assert module.validated and set(module.validated) == {torch.float32}
    assert_as_alone(module.net, level, maker, STEPS)


def test_fabric_tells_its_callbacks() -> None:
    told = []

    class Callback:
        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            told.append(type(optimizer))

    fabric = L.Fabric(accelerator="cpu", devices=1, callbacks=[Callback()])
    model = network()
    called, stepped = fabric.setup(model, MAKERS["preamp"](model.parameters()))
    with preamp.prepare(called, stepped, level="O5") as session:
        for index in range(3):
            step(session, called, index)
        with pytest.raises(preamp.errors.SessionError, match="not one of the session's"):
            session.step(fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1)))
    assert told == [preamp.optim.AdamW] * 3
    assert_as_alone(model, "O5", "preamp", 3)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("framework", ["Fabric", "Accelerate"])
def test_a_scaler_skips_behind_a_framework(framework: str, maker: str, unscales: bool) -> None:
    """torch's own steps by infinities there: its flag, an attribute, does not reach a fused optimizer behind Fabric."""
    setups: dict[str, Any] = {
        "": lambda model, optimizer: (model, optimizer),
        "Fabric": L.Fabric(accelerator="cpu", devices=1).setup,
        "Accelerate": accelerate.Accelerator(cpu=True).prepare,
    }
    ends = []
    for setup in ("", framework):
        model = network()
        called, stepped = setups[setup](model, MAKERS[maker](model.parameters()))
        scaler = preamp.GradScaler("cpu", init_scale=64.0)
        for index, x in enumerate(INPUTS):
            scaler.scale(called(x).square().mean()).backward()
            if index == 3:
                next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
            if unscales:
                scaler.unscale_(stepped)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(stepped)
            scaler.update()
            assert scaler.get_scale() == (64.0 if index < 3 else 32.0)
            stepped.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends) and bool(ends[0].isfinite().all())


STEPPERS: dict[str, Callable[[Any], Any]] = {
    "preamp": lambda params: preamp.optim.AdamW(params, 1e-3, eps=1e-4),
    "torch": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-4),
    "foreach": lambda params: torch.optim.AdamW(params, 1e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, 1e-3, eps=1e-4, fused=True),
}


@pytest.mark.parametrize(
    ("who", "maker"),
    [(who, maker) for who in ("scaler", "O1", "O2") for maker in STEPPERS if (who, maker) != ("scaler", "fused")],
)
def test_accelerates_schedulers_stand_still_while_we_skip(who: str, maker: str) -> None:
    """accelerate#4242: with a scaler a fused optimizer of torch never counts as skipped, and the schedule runs on."""
    accelerator, model = accelerate.Accelerator(cpu=True), network()
    if who == "scaler":
        accelerator.scaler = preamp.GradScaler("cpu", init_scale=2.0**120)
    optimizer = STEPPERS[maker](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    told = []
    with contextlib.ExitStack() as stack:
        if who != "scaler":
            scale = preamp.DynamicScale(4.0)
            session = stack.enter_context(preamp.prepare(model, optimizer, level=who, scale=scale))
        for index in range(4):
            if who == "scaler":
                loss = model(INPUTS[index]).square().mean() * (2.0**20 if index != 2 else 2.0**-110)
                accelerator.backward(loss)
                optimizer.step()
                skipped = accelerator.scaler.skipped
            else:
                with session.autocast():
                    loss = model(INPUTS[index]).float().square().mean() * (float("inf") if index != 2 else 1.0)
                session.backward(loss)
                skipped = session.step(optimizer).skipped
            schedule.step()
            optimizer.zero_grad()
            told.append((bool(optimizer.step_was_skipped), skipped, schedule.get_last_lr()[0]))
    assert told == [(True, True, 1e-3), (True, True, 1e-3), (False, False, 5e-4), (True, True, 5e-4)]
