"""What only a CUDA device can show: the same rules there, no waiting for it, real float16 training."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from benchmarks.counting import launches
from benchmarks.trainers import REFERENCE, REFERENCE_CAPTURED, Trainer
from benchmarks.works import works
from torch import Tensor, nn

import preamp
from preamp.zoo import TASKS, Recipe

pytestmark = pytest.mark.gpu

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 8)).cuda()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(step)
    x = torch.randn(128, 64, device="cuda", generator=generator)
    return x, x[:, :8].argmax(1)


def train(level: str, steps: int, **options: object) -> tuple[list[Tensor], preamp.StepReport]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, eps=1e-4, fused=True)
    losses = []
    with preamp.prepare(model, optimizer, level=level, **options) as session:
        for step in range(steps):
            x, y = batch(step)
            with session.autocast():
                loss = F.cross_entropy(model(x), y)
            session.backward(loss)
            session.clip_grad_norm_(1.0)
            report = session.step()
            session.zero_grad()
            losses.append(loss.detach())
        return losses, report


@pytest.mark.parametrize("level", LEVELS)
def test_levels_learn_as_float32_does(level: str) -> None:
    reference = float(torch.stack(train("O0", 200)[0][-20:]).mean())
    got = float(torch.stack(train(level, 200)[0][-20:]).mean())
    assert got == pytest.approx(reference, abs=0.15 if level == "O3" else 0.05)


@pytest.mark.parametrize("logged", [False, True])
def test_logging_skips_costs_no_wait(logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The row of skips is read once in `patience` steps, and what else is told comes with it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    x, y = batch(0)
    caplog.set_level(logging.INFO if logged else logging.ERROR, logger="preamp")
    waits = []
    with preamp.prepare(model, optimizer, level="O1", scale=preamp.DynamicScale(patience=5)) as session:
        for step in range(20):
            with session.autocast():
                loss = F.cross_entropy(model(x), y) * (float("inf") if step in (6, 12, 13) else 1.0)
            session.backward(loss)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                session.step()
                torch.cuda.set_sync_debug_mode("default")
            waits.append(len(caught))
            session.zero_grad()
    assert waits[5:] == [0, 0, 0, 0, 1] * 3
    wanted = [f"{n} of the last 5 steps were skipped: a gradient was not finite" for n in (1, 2)]
    assert [record.getMessage() for record in caplog.records] == (wanted if logged else [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rules_on_cuda_are_those_on_the_cpu(dtype: torch.dtype) -> None:
    calls = {
        "mm": lambda x: x.mm(x),
        "linear": lambda x: F.linear(x, x),
        "softmax": lambda x: x.mm(x).softmax(-1),
        "log_softmax": lambda x: F.log_softmax(x.mm(x), -1),
        "layer_norm": lambda x: F.layer_norm(x.mm(x), x.shape[-1:]),
        "exp": lambda x: x.mm(x).exp(),
        "sum": lambda x: x.mm(x).sum(),
        "cumsum": lambda x: x.mm(x).cumsum(0),
        "cat": lambda x: torch.cat([x.mm(x), x]),
        "cat-low": lambda x: torch.cat([x.mm(x), x.mm(x)]),
        "add": lambda x: x.mm(x) + x.mm(x),
        "gelu": lambda x: F.gelu(x.mm(x)),
        "cross_entropy": lambda x: F.cross_entropy(x.mm(x), torch.zeros(len(x), dtype=torch.long, device=x.device)),
        "fft": lambda x: torch.fft.rfft(x.mm(x)).real,
        "norm": lambda x: torch.linalg.vector_norm(x.mm(x)),
        "mv": lambda x: x.mv(x[0]),
        "atan2": lambda x: torch.atan2(x.mm(x), x),
    }
    x = torch.randn(8, 8)
    for name, call in calls.items():
        found = []
        for device in ("cpu", "cuda"):
            with preamp.autocast(device, dtype=dtype):
                found.append(call(x.to(device)).dtype)
        assert found[0] is found[1], f"{name}: {found[0]} on the CPU, {found[1]} on CUDA"
    with preamp.autocast("cuda", dtype=dtype), pytest.raises(RuntimeError, match="binary_cross_entropy"):
        F.binary_cross_entropy(torch.rand(4, device="cuda").to(dtype), torch.rand(4, device="cuda"))
    preamp.autocast.uninstall()


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_full_size_networks_take_steps_at_every_level(name: str, level: str) -> None:
    """A few real steps; the data packages are not on every GPU machine."""
    run_trial = pytest.importorskip("preamp.demo").run_trial
    task = TASKS[name]
    try:
        next(iter(task.batches("full", seed=0, steps=1, batch_size=2)))
    except preamp.errors.MissingExtra as missing:
        pytest.skip(str(missing))
    recipe = task.recipe("full", quick=True)
    short = Recipe(**{**recipe.__dict__, "steps": 6, "batch_size": min(8, recipe.batch_size)})
    trial = run_trial(task, level, size="full", seed=0, device=torch.device("cuda"), recipe=short)
    assert trial.complete and trial.peak_bytes > 0
    assert all(torch.isfinite(torch.tensor(trial.losses)))


def test_kernels_are_counted() -> None:
    x = torch.zeros(8, device="cuda")
    assert launches(lambda: None) == 0
    assert launches(lambda: [x.add_(1) for _ in range(5)]) == 5


def test_torch_captured_by_the_bench_trains_as_it_does_eagerly() -> None:
    """The contender that preamp's captured step is compared with does a whole step, its scaler's part included."""
    work = works(tiny=True)["BERT-base b4"]
    losses, scales = [], []
    for contender in (REFERENCE, REFERENCE_CAPTURED):
        trainer = Trainer(contender, work, torch.device("cuda", 0))
        losses.append([float(trainer.step()) for _ in range(12)])
        scales.append((trainer.scaler.get_scale(), trainer.scaler._get_growth_tracker()))
        trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[0][-1] != losses[0][0]
    assert scales[0] == scales[1]
