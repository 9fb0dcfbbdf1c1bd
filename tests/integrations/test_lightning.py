"""Lightning's Trainer with the plugin trains as a plain loop with a session, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from preamp.errors import SessionError

L: Any = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import Callback  # noqa: E402

from preamp.integrations.lightning import PreampPrecision  # noqa: E402

from .loops import BAD, CASES, CLIP, MAKERS, MICRO, STEPS, data, network, plain, schedule_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Module(L.LightningModule):
    """A module as its documentation writes it; `manual`: the one of its chapter on manual optimization."""

    def __init__(self, kind: str, manual: bool = False) -> None:
        super().__init__()
        self.net, self.kind, self.rates = network(), kind, list[float]()
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = self.trainer.precision_plugin.convert_input(data()[index])  # a resumed epoch begins with its first batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / MICRO)
        if (index + 1) % MICRO == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_scheduler_step(self.lr_schedulers(), None)
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        assert self.net(batch[0]).isfinite().all() or index == BAD * MICRO

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = MAKERS[self.kind](self.parameters())
        schedule = schedule_of(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keep(Callback):
    """What the session has when the fit ends."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.logged: dict[str, float] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.state = copy.deepcopy(trainer.precision_plugin.session.state_dict())
        self.parameters = [p.detach().clone() for p in module.parameters()]
        self.logged = {name: float(value) for name, value in trainer.logged_metrics.items()}


def fitted(
    level: str, kind: str, folder: Path, *, manual: bool = False, steps: int = STEPS, load: Path | None = None,
    callbacks: tuple[Callback, ...] = (),
) -> tuple[Keep, Module, Any]:  # fmt: skip
    kept, module = Keep(), Module(kind, manual)
    automatic = {} if manual else {"gradient_clip_val": CLIP, "accumulate_grad_batches": MICRO}
    trainer = L.Trainer(
        plugins=[PreampPrecision(level)], max_steps=steps, max_epochs=1, callbacks=[kept, *callbacks],
        log_every_n_steps=5, default_root_dir=folder, **SILENT, **automatic,
    )  # fmt: skip
    rows = DataLoader(data(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, rows, rows if not manual else None, ckpt_path=None if load is None else str(load))
    return kept, module, trainer


def assert_same(kept: Keep, wanted: dict[str, Any], parameters: list[Tensor]) -> None:
    named = {name.removeprefix("net."): value for name, value in kept.state["masters"].items()}
    torch.testing.assert_close(named, wanted["masters"], rtol=0, atol=0)
    torch.testing.assert_close(kept.parameters, parameters, rtol=0, atol=0)
    assert {**kept.state, "masters": 0} == {**wanted, "masters": 0} and wanted["skipped"] == 1


@pytest.mark.parametrize(
    ("level", "kind", "manual"),
    [*((*case, False) for case in CASES), ("O1", "preamp", True), ("O3", "preamp", True), ("O5", "foreach", True)],
)
def test_a_fit_is_a_session_loop(level: str, kind: str, manual: bool, tmp_path: Path) -> None:
    kept, module, trainer = fitted(level, kind, tmp_path, manual=manual)
    wanted, parameters, rates, _ = plain(level, kind, "session", low=("O3",))
    assert_same(kept, wanted, parameters)
    assert trainer.global_step == STEPS and module.rates[1::MICRO] == rates
    assert kept.logged["skipped_steps"] == 1.0 and kept.logged["loss_scale"] > 0
    assert {p.dtype for p in module.parameters()} == {torch.float32} and "lr_scheduler_step" not in vars(module)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_checkpoints_have_float32_weights_and_resume_bit_for_bit(level: str, tmp_path: Path) -> None:
    _, module, trainer = fitted(level, "preamp", tmp_path, callbacks=(Saver(tmp_path / "at20.ckpt", 20),))
    saved = torch.load(tmp_path / "at20.ckpt", weights_only=False)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    resumed, _, _ = fitted(level, "preamp", tmp_path, load=tmp_path / "at20.ckpt")
    wanted, parameters, *_ = plain(level, "preamp", "session")
    assert_same(resumed, wanted, parameters)
    rows = DataLoader(data()[-4:], batch_size=None)  # type: ignore[arg-type]
    for plugins in ([PreampPrecision(level)], []):  # where no session is made
        other = L.Trainer(plugins=plugins, default_root_dir=tmp_path, **SILENT)
        assert other.validate(Module("preamp"), rows, ckpt_path=str(tmp_path / "at20.ckpt"), verbose=False) == [{}]
    fresh = Module("preamp")
    fresh.load_state_dict(saved["state_dict"])  # without preamp
    assert trainer.validate(module, DataLoader(data()[-4:], batch_size=None), verbose=False) == [{}]  # type: ignore[arg-type]


class Saver(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class Reads(Callback):
    """Looks at gradients before the step, as a logger of norms does."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters()]
        assert {grad.dtype for grad in grads} == {torch.float32}
        self.norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_hooks_read_true_gradients(level: str, tmp_path: Path) -> None:
    reads = Reads()
    kept, _, _ = fitted(level, "preamp", tmp_path, callbacks=(reads,))
    wanted, parameters, *_ = plain(level, "preamp", "session, true")
    assert_same(kept, wanted, parameters)
    good = [norm for norm in reads.norms if norm == norm and norm != float("inf")]
    assert len(reads.norms) == STEPS and len(good) >= STEPS - 1 and max(good) < 100


def test_a_step_without_a_loss(tmp_path: Path) -> None:
    class Sometimes(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index % 3 == 0 else super().training_step(batch, index)

    module = Sometimes("preamp")
    trainer = L.Trainer(
        plugins=[PreampPrecision("O2", log=False)], max_epochs=1, default_root_dir=tmp_path, callbacks=[kept := Keep()],
        enable_checkpointing=False, **SILENT,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data()[:10], batch_size=None))  # type: ignore[arg-type]
    assert kept.state["steps"] == 6 and not kept.logged


def test_no_session_outside_of_a_fit() -> None:
    plugin = PreampPrecision("O2")
    assert plugin.precision == "preamp-O2" and plugin.state_dict() == {}
    with pytest.raises(SessionError, match=r"no session now: Trainer\.fit"):
        plugin.session
    with pytest.raises(ValueError, match=r"(?i)received both .precision"):
        L.Trainer(precision="bf16-mixed", plugins=[plugin], accelerator="cpu", logger=False)
    plugin.teardown()


class Predicts(L.LightningModule):
    """A module that says what it evaluates in."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = network(), set[torch.dtype]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def evaluated(self, batch: Any, index: int) -> Tensor:
        self.seen |= {self.net[0].weight.dtype, (out := self.net(batch[0])).dtype}
        return out

    validation_step = test_step = predict_step = evaluated

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_after_a_fit_a_trainer_evaluates_in_float32_and_saves_the_sessions_state(level: str, tmp_path: Path) -> None:
    module, rows = Predicts(), DataLoader(data()[:10], batch_size=None)  # type: ignore[arg-type]
    made = {**SILENT, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = L.Trainer(plugins=[PreampPrecision(level)], max_epochs=1, **made)
    trainer.fit(module, rows)
    state = trainer.precision_plugin.state_dict()
    for evaluate in (trainer.validate, trainer.test):
        evaluate(module, rows, verbose=False)
    predicted = trainer.predict(module, rows)
    assert module.seen == {torch.float32} and state["steps"] == 10
    assert all(torch.equal(out, module.net(x)) for out, (x, _) in zip(predicted, data(), strict=False))
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert torch.load(tmp_path / "later.ckpt", weights_only=False)["PreampPrecision"] == state
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows)  # another fit, with optimizers of its own
    trainer.predict(module, rows)
    assert trainer.precision_plugin.state_dict()["steps"] == 10 and module.seen == {torch.float32}


TWO = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader
import preamp
from preamp.integrations.lightning import PreampPrecision

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    def training_step(self, batch, index):
        x, y = batch
        if index == 6 and self.global_rank == 1:
            x = x * float("inf")
        return nn.functional.mse_loss(self.net(x).float(), y)
    def configure_optimizers(self):
        return preamp.optim.AdamW(self.parameters(), 1e-2)
    def on_train_end(self):
        mine = torch.cat([p.detach().float().flatten() for p in self.parameters()])
        both = self.all_gather(mine)
        session = self.trainer.precision_plugin.session
        assert both.shape[0] == 2 and torch.equal(both[0], both[1]) and (session.skipped, session.steps) == (1, 10)
        print(f"equal {type(self.trainer.strategy.model).__name__}\\n", end="", flush=True)

generator = torch.Generator().manual_seed(5)
rows = [(torch.randn(6, generator=generator), torch.randn(3, generator=generator)) for _ in range(160)]
trainer = L.Trainer(
    plugins=[PreampPrecision(sys.argv[1])], accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
    accumulate_grad_batches=2, gradient_clip_val=1.0, enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(Module(), DataLoader(rows, batch_size=4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_two_ranks(level: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TWO)
    done = subprocess.run([sys.executable, str(script), level], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal DistributedDataParallel") == 2
