"""Modules as Lightning's own tests write them run with the plugin as without: to float32's last digits at O0."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import preamp
from preamp.errors import SessionError

L: Any = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

from preamp.integrations.lightning import PreampPrecision  # noqa: E402

from .loops import BAD, MICRO, data, network  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
ROWS = [row for row in data()[:12] if row is not data()[BAD * MICRO]]
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Plain(L.LightningModule):
    """Automatic optimization, by momentum, on a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x).float(), y)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("seen", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class StepsItself(Plain):
    """Runs the closure itself, and steps after every other batch."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        closure()
        if index % 2 == 0:
            optimizer.step()


class LosesSome(Plain):
    """Has no loss for some batches, among them the last one of a step of two."""

    def training_step(self, batch: Any, index: int) -> Any:
        return None if index in (3, 6, 8, 9) else self.loss(batch)


class Dictionary(Plain):
    """Returns a dictionary, and clips by value in its own hook."""

    def training_step(self, batch: Any, index: int) -> Any:
        return {"loss": self.loss(batch), "more": 1}

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, 0.01, "value")


class Backwards(Plain):
    """Has a backward of its own, and reads gradients before the step."""

    def backward(self, loss: Any) -> None:
        loss.backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad.dtype is torch.float32 for p in self.parameters())


class Twins(L.LightningModule):
    """Manual optimization of two networks with toggling, closures, and steps at frequencies of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.automatic_optimization = network(), network(), False

    def training_step(self, batch: Any, index: int) -> None:
        (x, y), (one, two) = batch, self.optimizers()
        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.first(x).float() + self.second(x).float(), y))
        assert all(p.grad is None for p in self.second.parameters())
        self.clip_gradients(one, 0.1, "norm")
        one.step()
        self.untoggle_optimizer(one)

        def closure() -> Any:
            loss = nn.functional.mse_loss(self.second(x).float(), y)
            two.zero_grad()
            self.manual_backward(loss)
            return loss

        with two.toggle_model(sync_grad=index % 2 == 0):
            if index % 2:
                assert two.step(closure) is not None
                two.zero_grad()
        if self.trainer.is_last_batch:
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(net.parameters(), 1e-2, eps=1e-4) for net in (self.first, self.second)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers]


class Trace(Callback):
    """The names of a callback's hooks, as they are called, and of checkpoints' entries."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name != "on_before_optimizer_step":
            calls = super().__getattribute__("calls")
            return lambda *_, **__: calls.append(name)
        return super().__getattribute__(name)


class Idle(Plain):
    """Manual optimization that steps also where it has no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        if index % 2:
            self.manual_backward(self.loss(batch))
        optimizer.step()


class Fetches(Plain):
    """Takes batches from the loader itself, of which Lightning knows no size then."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Sharpness(Plain):
    """Moves its weights between two backward passes, and back, as SAM does, all of it inside of `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer, moves = self.optimizers(), [torch.full_like(p, 0.25) for p in self.parameters()]
        self.manual_backward(self.loss(batch))
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(list(self.parameters()), moves)
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            torch._foreach_sub_(list(self.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()


class Untrained(Plain):
    """Has no optimizer: the Trainer runs it all the same."""

    def configure_optimizers(self) -> None:
        return None


MODULES = [Plain, StepsItself, LosesSome, Dictionary, Backwards, Twins, Idle, Fetches, Sharpness, Untrained]


def fitted(kind: Any, folder: Path, plugins: list[Any], more: Any = (), **options: Any) -> tuple[Any, list[str], Any]:
    torch.manual_seed(0)
    module, trace = kind(), Trace()
    if module.automatic_optimization:
        options = {
            "accumulate_grad_batches": 2 if kind is LosesSome else 1,
            "gradient_clip_val": None if kind is Dictionary else 0.1,
            **options,
        }
    options = {"max_epochs": 2, "log_every_n_steps": 3, "enable_checkpointing": False, **options}
    trainer = L.Trainer(plugins=plugins, callbacks=[trace, *more], default_root_dir=folder, **SILENT, **options)
    rows: Any = DataLoader(ROWS, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, rows, rows if kind is Plain else None)
    return module, trace.calls, trainer


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_trains_as_without_the_plugin(kind: Any, tmp_path: Path) -> None:
    wanted, calls, trainer = fitted(kind, tmp_path, [])
    for level in ("O0", "O4", "O5"):
        module, traced, other = fitted(kind, tmp_path, [PreampPrecision(level, log=level != "O0")])
        bounds = {"rtol": 0.0, "atol": 1e-6 if level == "O0" else 0.02}
        torch.testing.assert_close(module.state_dict(), wanted.state_dict(), **bounds)
        pickle.dumps(other.precision_plugin)
        assert traced == calls and other.global_step == trainer.global_step
        rates = [[s.scheduler.get_last_lr() for s in t.lr_scheduler_configs] for t in (trainer, other)]
        assert rates[0] == rates[1]
        assert all(p.requires_grad and p.dtype is torch.float32 for p in module.parameters())


class ScheduleFree(Plain):
    """Calls `train` and `eval` of the optimizer that the Trainer hands out, also before a checkpoint is saved."""

    def configure_optimizers(self) -> Any:
        return pytest.importorskip("schedulefree").AdamWScheduleFree(self.parameters(), lr=0.05)

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_save_checkpoint(self, _: Any) -> None:
        self.optimizers().eval()


def test_what_the_trainer_hands_out_for_an_optimizer_exchanges_masters(tmp_path: Path) -> None:
    rows: Any = DataLoader(ROWS, batch_size=None)  # type: ignore[arg-type]
    ends = []
    for plugins in ([], [PreampPrecision("O5")]):
        module, _, first = fitted(ScheduleFree, tmp_path, plugins)
        first.save_checkpoint(tmp_path / "at.ckpt")
        trainer = L.Trainer(plugins=plugins, max_epochs=4, default_root_dir=tmp_path, **SILENT)
        trainer.fit(module, rows, rows, ckpt_path=str(tmp_path / "at.ckpt"), weights_only=True)
        assert not {"train", "eval"} & vars(trainer.strategy._lightning_optimizers[0]).keys()
        ends.append(module.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1)]
)
def test_averages_of_weights_are_those_of_masters(average: Any, tmp_path: Path) -> None:
    wanted, _, _ = fitted(Plain, tmp_path, [], more=[average()], max_epochs=4)
    for level in ("O2", "O5"):
        callback = average()
        module, _, _ = fitted(Plain, tmp_path, [PreampPrecision(level)], more=[callback], max_epochs=4)
        torch.testing.assert_close(module.state_dict(), wanted.state_dict(), rtol=0, atol=0.02)
        weight = module.net[0].weight
        assert weight.bfloat16().float().ne(weight).float().mean() > 0.9  # not rounded on the way
        assert not [name for name in vars(callback) if name.startswith("on_")]


def test_a_compiled_module(tmp_path: Path) -> None:
    module = Plain()
    trainer = L.Trainer(plugins=[PreampPrecision("O5")], max_steps=2, default_root_dir=tmp_path, **SILENT)
    trainer.fit(torch.compile(module, backend="eager"), DataLoader(ROWS, batch_size=None))  # type: ignore[arg-type]
    other, _, _ = fitted(Plain, tmp_path, [PreampPrecision("O5")], max_steps=2, gradient_clip_val=None)
    torch.testing.assert_close(module.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_trainer_that_logs_nothing(tmp_path: Path) -> None:
    _, _, trainer = fitted(Plain, tmp_path, [PreampPrecision("O5")], log_every_n_steps=0)
    assert "loss_scale" not in trainer.logged_metrics


def test_the_trainers_loop_runs_after_the_fit(tmp_path: Path) -> None:
    """As some do to look at one more batch; there is no session then."""
    module, _, trainer = fitted(Plain, tmp_path, [PreampPrecision("O5")], gradient_clip_val=None)
    before = module.net[0].weight.clone()
    batch = {"batch": ROWS[0], "batch_idx": 0}
    loss = trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, batch)["loss"]
    assert loss.isfinite() and not torch.equal(module.net[0].weight, before)


def test_optimizers_that_are_refused_are_named_before_harm(tmp_path: Path) -> None:
    class Quasi(Plain):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(SessionError, match="LBFGS evaluates the loss several times"):
        fitted(Quasi, tmp_path, [PreampPrecision("O4")])

    class Odd(Idle):
        def training_step(self, batch: Any, index: int) -> None:
            self.optimizers().step(how="fast")

    with pytest.raises(SessionError, match="got how"):
        fitted(Odd, tmp_path, [PreampPrecision("O4")])


def test_fsdp1_says_which_strategy_shards_instead() -> None:
    with pytest.raises(TypeError, match="shard by ModelParallelStrategy"):
        FSDPStrategy(precision_plugin=PreampPrecision("O5"))


def test_tied_weights_are_saved_in_float32_under_both_names(tmp_path: Path) -> None:
    class Tied(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 3)
            self.other.weight = self.net[3].weight

    module, _, trainer = fitted(Tied, tmp_path, [PreampPrecision("O5")], max_steps=3, enable_checkpointing=True)
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)["state_dict"]
    assert {value.dtype for value in saved.values()} == {torch.float32}
    torch.testing.assert_close(saved, module.state_dict(), rtol=0, atol=0)
    assert "_with_masters" not in str(module._state_dict_hooks)


class Copies(Callback):
    """Copies and pickles the module while it trains."""

    def on_train_batch_end(self, _: Any, module: Any, *__: Any) -> None:
        self.copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


def test_a_module_can_be_copied_and_pickled_while_it_trains(tmp_path: Path) -> None:
    callback = Copies()
    fitted(Plain, tmp_path, [PreampPrecision("O4")], more=[callback])
    for each in callback.copies:
        step = each.lr_scheduler_step
        assert step.__self__ is each and step.__func__ is L.LightningModule.lr_scheduler_step
        trainer = L.Trainer(max_steps=2, default_root_dir=tmp_path, **SILENT)
        trainer.fit(each, DataLoader(ROWS, batch_size=None))  # type: ignore[arg-type]
        assert trainer.global_step == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_saved_after_the_fit_resumes_bit_for_bit(level: str, tmp_path: Path) -> None:
    def plugin() -> Any:
        return PreampPrecision(level, scale=preamp.DynamicScale(init_scale=2.0**30))

    wanted, _, whole = fitted(Plain, tmp_path, [plugin()], max_epochs=2)
    _, _, trainer = fitted(Plain, tmp_path, [plugin()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    torch.manual_seed(0)
    module = Plain()
    other = L.Trainer(plugins=[plugin()], max_epochs=2, gradient_clip_val=0.1, default_root_dir=tmp_path, **SILENT)
    rows: Any = DataLoader(ROWS, batch_size=None)  # type: ignore[arg-type]
    other.fit(module, rows, rows, ckpt_path=str(tmp_path / "after.ckpt"), weights_only=True)
    torch.testing.assert_close(module.state_dict(), wanted.state_dict(), rtol=0, atol=0)
    states = [each.precision_plugin.state_dict() for each in (whole, other)]
    assert states[0] == states[1] and states[0]["skipped"] > 0
    fitted(Plain, tmp_path, [other.precision_plugin])  # another fit has a state of its own
    assert other.precision_plugin.state_dict()["steps"] == len(ROWS) * 2
