"""Ignite's supervised trainer at O5: which flights from New York arrive late?

    pip install "preamp[demo]" pytorch-ignite
    python examples/ignite_trainer.py

The trainer is made as for `torch.amp.GradScaler`; it gets a `SessionScaler` in its place.
"""

from __future__ import annotations

import argparse

import torch
from ignite.engine import Engine, Events, create_supervised_trainer

import preamp
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", choices=["O2", "O5"], default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    batches = list(TASK.batches("ci", seed=0, steps=given.steps, batch_size=RECIPE.batch_size))
    model = TASK.build("ci", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.max_lr, total_steps=given.steps + 1)
    with preamp.prepare(model, optimizer, level=given.level) as session:
        trainer = create_supervised_trainer(
            model, optimizer, TASK.loss, amp_mode="amp", scaler=preamp.SessionScaler(session),
            model_fn=lambda net, inputs: net(*inputs),
        )  # fmt: skip

        @trainer.on(Events.ITERATION_COMPLETED)
        def advance(engine: Engine) -> None:
            if not session.last_step.skipped:
                schedule.step()

        trainer.run(batches, max_epochs=1)
        print(f"{session.steps} steps, {session.skipped} skipped, loss scale {session.loss_scale():g}")
    model.eval()
    print(f"{TASK.metric}: {TASK.evaluate(model, 'ci', device=torch.device('cpu')):.4f}")


if __name__ == "__main__":
    main()
