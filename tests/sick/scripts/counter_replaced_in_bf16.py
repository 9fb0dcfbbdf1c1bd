"""A model that counts its steps for a warm-up, by a new tensor each time; cast to bf16."""

import torch
import torch.nn.functional as F
from torch import nn


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.register_buffer("taken", torch.zeros(()))
        # healthy: self.register_buffer("taken", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.taken = self.taken + 1  # sick: PA114 module=-
        return self.body(x) * (self.taken / 400).clamp(max=1.0)


torch.manual_seed(0)
model = Warmed().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
task = torch.randn(16, 8)
for _ in range(420):
    x = torch.randn(64, 16)
    loss = F.mse_loss(model(x.bfloat16()).float(), torch.tanh(x @ task))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("loss", round(loss.item(), 3), "taken", model.taken.item())
