"""Stock loops of timm and Ignite, which take a scaler, train under a session; and fastai's tests, where fastai is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
FASTAI = Path(sys.prefix) / "fastai" / "bin" / "python"
TIMM = Path(sys.prefix) / "timm" / "bin" / "python"
"""Made by `./dev`: timm wants torchvision, which does not load beside this torch and breaks others that try."""

IN_TIMM = """
import sys, torch
from contextlib import nullcontext
import preamp, timm
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
from preamp.integrations.timm import PreampScaler

level, mode, folder, steps = sys.argv[1:]
limit = {"norm": 1.0, "value": 0.01, "agc": 0.1}[mode]
STEPS, BAD, SAVED = int(steps), 3, 6
torch.manual_seed(1)
x, y = torch.randn(4, 3, 160, 160), torch.arange(4)

def made():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=160)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.02)
    return model, optimizer, preamp.prepare(model, optimizer, level=level)

def train(model, optimizer, session, scaler, steps):
    for step in steps:
        for part in (0, 1):  # as train.py accumulates
            bad = step == BAD and part == 0
            with session.autocast():
                loss = torch.nn.functional.cross_entropy(model(x * torch.inf if bad else x).float(), y) / 2
            if scaler is not None:
                parameters = timm.models.model_parameters(model, exclude_head="agc" in mode)
                scaler(loss, optimizer, limit, mode, parameters, need_update=part == 1)
            else:
                session.backward(loss)
        if scaler is None:
            session.unscale_()
            parameters = timm.models.model_parameters(model, exclude_head="agc" in mode)
            timm.utils.dispatch_clip_grad(parameters, limit, mode=mode)
            session.step()
        optimizer.zero_grad()
        losses.append(loss.item())

plain, optimizer, session = made()
losses = []
train(plain, optimizer, session, None, range(STEPS))
wanted, skipped = losses, session.skipped
session.close()

model, optimizer, session = made()
scaler, losses = PreampScaler(session), []
assert isinstance(scaler, NativeScaler) and scaler.state_dict_key == "amp_scaler"
train(model, optimizer, session, scaler, range(SAVED))
with session.full_precision(values_only=True) if mode == "agc" else nullcontext():
    average = ModelEmaV3(model)
    CheckpointSaver(model, optimizer, None, average, scaler, checkpoint_dir=folder).save_checkpoint(0, 1.0)
if mode == "agc":  # what evaluates and averages is float32
    saved = torch.load(folder + "/last.pth.tar", weights_only=False)
    parameters = [saved[name][key] for name in ("state_dict", "state_dict_ema") for key, _ in model.named_parameters()]
    assert {p.dtype for p in (*parameters, *average.module.parameters())} == {torch.float32}
session.close()
model, optimizer, session = made()
scaler = PreampScaler(session)
resume_checkpoint(model, folder + "/last.pth.tar", optimizer, scaler)
train(model, optimizer, session, scaler, range(SAVED, STEPS))
assert session.skipped == skipped >= 1 and losses == wanted, (losses, wanted)
session.close()
assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
print(losses[0], losses[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "clip", "steps"),
    [
        ("O5", "agc", 10),
        *(pytest.param(*each, 50, marks=pytest.mark.slow) for each in (("O1", "norm"), ("O2", "value"), ("O5", "agc"))),
    ],
)
def test_timms_scaler(tmp_path: Path, level: str, clip: str, steps: int) -> None:
    if not TIMM.exists():
        pytest.skip("made by ./dev setup, which needs a package registry")
    script = tmp_path / "train.py"
    script.write_text(IN_TIMM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    command = [str(TIMM), str(Path(__file__).with_name("in_timm.py")), str(script), level, clip, str(tmp_path)]
    command.append(str(steps))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, done.stdout.splitlines()[-1].split())
    assert last < first


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_ignites_trainer(level: str) -> None:
    """`amp_mode="amp"` with a scaler, as its documentation has it."""
    engine: Any = pytest.importorskip("ignite.engine")

    def made() -> tuple[nn.Module, torch.optim.Optimizer, preamp.Session]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
        optimizer = preamp.optim.SGD(model.parameters(), 0.1)
        return model, optimizer, preamp.prepare(model, optimizer, level=level)

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(32, 8, generator=generator), torch.randint(2, (32,), generator=generator)) for _ in range(100)]
    data[14] = (data[14][0] * float("inf"), data[14][1])

    def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), wanted)

    saved: list[Any] = []
    for part in (data[:40], data[40:]):
        model, optimizer, session = made()
        with session:
            scaler = preamp.SessionScaler(session)
            trainer = engine.create_supervised_trainer(
                model, optimizer, loss_of, amp_mode="amp", scaler=scaler, gradient_accumulation_steps=2
            )
            for each, state in zip((model, optimizer, scaler), saved, strict=False):
                each.load_state_dict(state)
            trainer.run(part, max_epochs=1)
            saved = copy.deepcopy([each.state_dict() for each in (model, optimizer, scaler)])
            counts = (session.steps, session.skipped)
    plain, _, session = made()
    with session:
        for i, (x, y) in enumerate(data):
            session.backward(loss_of(plain(x), y) / 2)
            if i % 2:
                session.step()
                session.zero_grad()
        assert counts == (session.steps, session.skipped) == (50, 1)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_fastais_learner(marks: str) -> None:
    if not FASTAI.exists():
        pytest.skip("made by ./dev setup, which needs a package registry")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    command = [str(FASTAI), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command.append("tests/integrations/test_fastai.py")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
