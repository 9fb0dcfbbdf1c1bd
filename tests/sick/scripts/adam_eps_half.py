"""A regressor cast to half and trained with Adam's default epsilon, 1e-8, which is zero in fp16 (pytorch#147437)."""

import torch
from torch import nn

torch.manual_seed(0)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


data = torch.randn(64, 16)
target = torch.tanh(data[:, :8])
model = Regressor().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # sick: PA101 module=-
LOSS_SCALE = 128.0

for step in range(6):
    loss = nn.functional.mse_loss(model(data.half()).float(), target)
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad.div_(LOSS_SCALE)
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
