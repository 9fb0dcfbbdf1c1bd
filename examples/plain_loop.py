"""A loop of your own at O5: which flights from New York arrive late?

    pip install "preamp[demo]"
    python examples/plain_loop.py
    python examples/plain_loop.py --resume      # goes on from the last checkpoint, with the same bits

It accumulates gradients over two batches, clips them, follows a schedule, saves, and evaluates in float32.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import preamp
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")
PARTS = 2  # batches a step
CHECKPOINT = Path("plain_loop.ckpt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    model = TASK.build("ci", seed=0).to(device)
    optimizer = preamp.optim.AdamW(model.parameters(), RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.max_lr, total_steps=given.steps + 1)
    session = preamp.prepare(model, optimizer, level=given.level)
    if given.resume:
        preamp.checkpoint.load(CHECKPOINT, model=model, optimizer=optimizer, schedule=schedule, session=session)

    batches = list(TASK.batches("ci", seed=0, steps=given.steps * PARTS, batch_size=RECIPE.batch_size // PARTS))
    for step in range(session.steps, given.steps):
        for inputs, late in batches[step * PARTS : (step + 1) * PARTS]:
            inputs, late = tuple(one.to(device) for one in inputs), late.to(device)
            with session.autocast():
                loss = TASK.loss(model(*inputs), late)
            session.backward(loss / PARTS)
        session.clip_grad_norm_(RECIPE.clip)
        if not session.step().skipped:  # reads the report, which waits for the device; only the schedule needs it
            schedule.step()
        session.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == given.steps:
            print(f"step {step + 1}: loss {loss.item():.4f}")
            preamp.checkpoint.save(CHECKPOINT, model=model, optimizer=optimizer, schedule=schedule, session=session)

    model.eval()
    with session.full_precision():  # the float32 masters
        quality = TASK.evaluate(model, "ci", device=device)
    session.close()  # the model is float32 again, and the optimizer as it was
    print(f"{TASK.metric}: {quality:.4f}")


if __name__ == "__main__":
    main()
