"""A Lightning module in bf16-mixed whose entropy bonus takes the log of probabilities that have rounded to zero."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.logits = nn.Linear(32, 8)

    def forward(self, x):
        p = torch.softmax(1000 * self.logits(torch.tanh(self.body(x))), dim=-1)
        entropy = -(p * p.log()).sum(dim=-1)  # sick: PA201 module=policy
        return p, entropy


class Agent(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.policy = Policy()

    def training_step(self, batch, index):
        x, reward = batch
        p, entropy = self.policy(x)
        loss = -(p * reward).sum(dim=-1).float().mean() - 0.01 * entropy.float().mean()
        print(index, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(74)
loader = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 8)), batch_size=16)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", precision="bf16-mixed", max_epochs=1, **quiet)
trainer.fit(Agent(), loader)
