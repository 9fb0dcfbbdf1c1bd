"""A loop of HF Accelerate at O5: which flights from New York arrive late?

    pip install "preamp[demo,accelerate]"
    accelerate launch examples/accelerate_loop.py

The loop is written as for Accelerate alone. `attach(accelerator, level)` is the only line of preamp.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from preamp.integrations.accelerate import attach
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    attached = attach(accelerator, given.level)

    batches = list(TASK.batches("ci", seed=0, steps=2 * given.steps, batch_size=RECIPE.batch_size // 2))
    model = TASK.build("ci", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.max_lr, total_steps=given.steps)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(batches, batch_size=None), schedule
    )
    for inputs, late in loader:
        with accelerator.accumulate(model):
            loss = TASK.loss(model(*inputs), late)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), RECIPE.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    session = attached.session
    accelerator.print(f"{session.steps} steps, {session.skipped} skipped, loss scale {session.loss_scale():g}")
    attached.close()
    model.eval()
    accelerator.print(f"{TASK.metric}: {TASK.evaluate(model, 'ci', device=accelerator.device):.4f}")


if __name__ == "__main__":
    main()
