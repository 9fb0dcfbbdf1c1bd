"""Adam with its default epsilon under an fp16 region: parameters and state are float32, so 1e-8 is a number there."""

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
model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(data), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
