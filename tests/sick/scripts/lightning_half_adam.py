"""Lightning with 16-true: Adam's epsilon of 1e-8 meets fp16 state, and the first zero gradient makes 0 / 0."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 8)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.encoder(x)).float(), y.float())
        print(index, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)  # sick: PA101 module=-


torch.manual_seed(76)
x = torch.randn(64, 16)
loader = DataLoader(TensorDataset(x, x[:, :8].sin()), batch_size=16)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", precision="16-true", max_epochs=1, **quiet)
trainer.fit(Regressor(), loader)
