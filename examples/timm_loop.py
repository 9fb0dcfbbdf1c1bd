"""timm's training step at O5: which digit is it?

    pip install "preamp[demo]" timm
    python examples/timm_loop.py

The loop is that of timm's `train.py`, whose `amp_autocast` and `loss_scaler` are preamp's.
"""

from __future__ import annotations

import argparse

import timm
import torch
from timm.models import model_parameters
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import preamp
from preamp.integrations.timm import PreampScaler
from preamp.zoo import TASKS

TASK = TASKS["seresnext"]
ACCUMULATE, CLIP = 2, 1.0


def enlarged(images: Tensor) -> Tensor:
    """Digits as large as the network wants them."""
    return nn.functional.interpolate(images, size=64, mode="bilinear")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = timm.create_model("test_resnet", in_chans=1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3)
    session = preamp.prepare(model, optimizer, level=given.level)
    amp_autocast = session.autocast
    loss_scaler = PreampScaler(session)

    batches = TASK.batches("ci", seed=0, steps=ACCUMULATE * given.steps, batch_size=32)
    for index, ((images,), digits) in enumerate(batches):
        last = index % ACCUMULATE == ACCUMULATE - 1
        with amp_autocast():
            loss = nn.functional.cross_entropy(model(enlarged(images)), digits) / ACCUMULATE
        loss_scaler(loss, optimizer, clip_grad=CLIP, parameters=model_parameters(model), need_update=last)
        if last:
            optimizer.zero_grad()
    print(f"{session.steps} steps, {session.skipped} skipped, loss scale {session.loss_scale():g}")
    session.close()

    model.eval()
    accuracy = TASK.evaluate(lambda images: model(enlarged(images)), "ci", device=torch.device("cpu"))
    print(f"{TASK.metric}: {accuracy:.4f}")


if __name__ == "__main__":
    main()
