"""A Lightning module in bf16-mixed with gradient clipping by the Trainer."""

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
        loss = nn.functional.cross_entropy(self.head(torch.relu(self.encoder(x))), y)
        print(index, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(18)
x = torch.randn(128, 16)
loader = DataLoader(TensorDataset(x, x[:, :8].argmax(dim=1)), batch_size=16)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", precision="bf16-mixed", max_epochs=1, gradient_clip_val=1.0, **quiet)
trainer.fit(Classifier(), loader)
