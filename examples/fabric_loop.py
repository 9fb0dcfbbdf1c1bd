"""A loop of Lightning Fabric at O5: which flights from New York arrive late?

    pip install "preamp[demo]" lightning
    python examples/fabric_loop.py

The loop is written as for Fabric alone. `plugins=[precision]` is the only line of preamp.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from preamp.integrations.fabric import PreampPrecision
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


def main(level: str, steps: int) -> None:
    precision = PreampPrecision(level)
    fabric = Fabric(plugins=[precision], devices=1)
    fabric.launch()

    batches = list(TASK.batches("ci", seed=0, steps=steps, batch_size=RECIPE.batch_size))
    model = TASK.build("ci", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.max_lr, total_steps=steps)
    model, optimizer = fabric.setup(model, optimizer)
    for inputs, late in fabric.setup_dataloaders(DataLoader(batches, batch_size=None)):
        fabric.backward(TASK.loss(model(*inputs), late))
        fabric.clip_gradients(model, optimizer, max_norm=RECIPE.clip, error_if_nonfinite=False)
        optimizer.step()
        if not precision.session.last_step.skipped:
            schedule.step()
        optimizer.zero_grad()

    session = precision.session
    fabric.print(f"{session.steps} steps, {session.skipped} skipped, loss scale {session.loss_scale():g}")
    precision.close()
    model.eval()
    fabric.print(f"{TASK.metric}: {TASK.evaluate(model.module, 'ci', device=fabric.device):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    main(**vars(parser.parse_args()))
