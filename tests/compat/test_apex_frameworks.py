"""Frameworks that still speak to Apex, unmodified, through `install_as_apex()`: ignite and timm."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
IN_TIMM = Path(__file__).resolve().parents[1] / "integrations" / "in_timm.py"
TIMM = Path(sys.prefix) / "timm" / "bin" / "python"
"""Made by `./dev`: timm wants torchvision, which does not load beside this torch and breaks others that try."""


def run(interpreter: list[str | Path], text: str, folder: Path) -> list[str]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([*interpreter, file], capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_ignite_with_amp_mode_apex(tmp_path: Path, level: str) -> None:
    out = run([sys.executable], f"""
        import torch, preamp
        preamp.install_as_apex()
        from apex import amp
        from ignite.engine import Events, create_supervised_trainer
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)
        x = torch.randn(32, 8)
        data = [(x, (x[:, 0] > 0).long())] * 30
        trainer = create_supervised_trainer(model, optimizer, torch.nn.CrossEntropyLoss(), amp_mode="apex")
        losses = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
        trainer.run(data, max_epochs=1)
        assert amp.state_dict()["loss_scaler0"]["unskipped"] >= 28
        print(losses[0], losses[-1])
    """, tmp_path)  # fmt: skip
    first, last = map(float, out[-1].split())
    assert last < first / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "clip"),
    [("O1", "norm"), *(pytest.param("O2", clip, marks=pytest.mark.slow) for clip in ("value", "agc"))],
)
def test_timms_apex_scaler(tmp_path: Path, level: str, clip: str) -> None:
    """As timm's own train.py uses it, with a checkpoint of its own."""
    if not TIMM.exists():
        pytest.skip("made by ./dev setup, which needs a package registry")
    out = run([TIMM, IN_TIMM], f"""
    import torch
    import preamp
    preamp.install_as_apex()
    from apex import amp
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ApexScaler, CheckpointSaver
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=4, img_size=160)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.02)
    model, optimizer = amp.initialize(model, optimizer, opt_level={level!r}, verbosity=0)
    scaler = ApexScaler()
    x, y = torch.randn(4, 3, 160, 160), torch.arange(4)
    losses = []
    for step in range(8):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        limit = {{"norm": 1.0, "value": 0.01, "agc": 0.1}}[{clip!r}]
        parameters = timm.models.model_parameters(model, exclude_head=True)
        scaler(loss, optimizer, clip_grad=limit, clip_mode={clip!r}, parameters=parameters)
        losses.append(float(loss.detach()))
    state = scaler.state_dict()
    assert scaler.state_dict_key == "amp" and state["loss_scaler0"]["unskipped"] > 0
    scaler.load_state_dict(state)
    CheckpointSaver(model, optimizer, amp_scaler=scaler, checkpoint_dir={str(tmp_path)!r}).save_checkpoint(0, 1.0)
    print(losses[0], losses[-1], all(torch.isfinite(p).all() for p in model.parameters()))
    """, tmp_path)  # fmt: skip
    first, last, finite = out[-1].split()
    assert finite == "True" and float(last) < float(first)
