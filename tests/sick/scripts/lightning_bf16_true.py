"""Lightning with bf16-true and a fine-tuning rate of 1e-5: most weights are too coarse to move at a step."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 64)
        self.head = nn.Linear(64, 8)

    def training_step(self, batch, index):
        x, y = batch
        logits = self.head(torch.relu(self.encoder(x)))
        loss = nn.functional.cross_entropy(logits.float(), y)
        print(index, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


torch.manual_seed(75)
loader = DataLoader(TensorDataset(torch.randn(128, 16), torch.randint(0, 8, (128,))), batch_size=16)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", precision="bf16-true", max_epochs=1, **quiet)  # sick: PA204 module=. line=any
trainer.fit(Classifier(), loader)
