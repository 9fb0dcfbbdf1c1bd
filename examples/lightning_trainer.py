"""Lightning's Trainer at O5: which flights from New York arrive late?

    pip install "preamp[demo]" lightning
    python examples/lightning_trainer.py

The module is written as for Lightning alone. `plugins=[PreampPrecision(level)]` is the only line of preamp.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from preamp.integrations.lightning import PreampPrecision
from preamp.zoo import TASKS

TASK = TASKS["flights"]
RECIPE = TASK.recipe("ci")


class Late(L.LightningModule):
    """Embeddings of carrier, airports and time, and a few layers."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net, self.steps = TASK.build("ci", seed=0), steps

    def training_step(self, batch: Any, index: int) -> Tensor:
        """The loss of a batch."""
        inputs, late = batch
        loss = TASK.loss(self.net(*inputs), late)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW on a OneCycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), RECIPE.max_lr, weight_decay=RECIPE.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE.max_lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="O5")
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    given = parser.parse_args()

    batches = list(TASK.batches("ci", seed=0, steps=given.steps, batch_size=RECIPE.batch_size))
    module = Late(given.steps)
    trainer = L.Trainer(
        plugins=[PreampPrecision(given.level)],
        max_epochs=1,
        gradient_clip_val=RECIPE.clip,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    module.eval()
    print(f"{TASK.metric}: {TASK.evaluate(module.net, 'ci', device=module.device):.4f}")


if __name__ == "__main__":
    main()
