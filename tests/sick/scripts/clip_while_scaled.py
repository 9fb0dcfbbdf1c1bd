"""A recurrent forecaster that clips its gradients before they are unscaled, so clipping eats them (accelerate#641)."""

import torch
from torch import nn

torch.manual_seed(13)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(24, 16)
        self.readout = nn.Linear(16, 8)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], dim=-1)))
        return self.readout(h)


series = torch.randn(32, 5, 8)
target = series[:, -1] * 0.5
model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
for step in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(series), target)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # sick: PA106 module=-
    # healthy: scaler.unscale_(optimizer)
    # healthy: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.5f}")
