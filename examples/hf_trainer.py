"""HF Trainer at O5: which flights from New York arrive late?

    pip install "preamp[demo,accelerate]" transformers
    python examples/hf_trainer.py

The program is written as for the Trainer alone. `attach(trainer, level)` is the only line of preamp.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from preamp.integrations.transformers import attach
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


class Late(nn.Module):
    """Embeddings of carrier, airports and time, and a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TASK.build("ci", seed=0)

    def forward(self, categories: Tensor, numbers: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits of a batch."""
        logits = self.net(categories, numbers)
        return {"loss": TASK.loss(logits, labels), "logits": logits}


def as_batch(rows: list[Any]) -> dict[str, Tensor]:
    """Rows are batches already."""
    ((categories, numbers), late) = rows[0]
    return {"categories": categories, "numbers": numbers, "labels": late}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    batches = list(TASK.batches("ci", seed=0, steps=given.steps, batch_size=RECIPE.batch_size))
    model = Late()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=given.steps, per_device_train_batch_size=1, learning_rate=RECIPE.max_lr,
            weight_decay=RECIPE.weight_decay, max_grad_norm=RECIPE.clip, warmup_steps=given.steps // 4,
            lr_scheduler_type="cosine", logging_steps=max(1, given.steps // 5), report_to=[],
            remove_unused_columns=False, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=batches, data_collator=as_batch)
        attach(trainer, given.level)
        trainer.train()
    model.eval()
    device = next(model.parameters()).device
    print(f"{TASK.metric}: {TASK.evaluate(model.net, 'ci', device=torch.device(device)):.4f}")


if __name__ == "__main__":
    main()
