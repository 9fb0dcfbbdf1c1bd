"""A sensor net whose own standardiser computes E[x^2] - E[x]^2 in fp16, on readings that sit far from zero."""

import torch
from torch import nn

torch.manual_seed(10)


class Standardise(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = x.pow(2).mean(dim=-1, keepdim=True) - mean.pow(2)  # sick: PA104 module=norm
        return (x - mean) / var.clamp(min=0.25).sqrt()


class SensorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.calibrate = nn.Linear(64, 64)
        self.norm = Standardise()
        self.head = nn.Linear(64, 8)
        nn.init.eye_(self.calibrate.weight)

    def forward(self, x):
        return self.head(self.norm(self.calibrate(x)))


readings = 60 + torch.randn(32, 64)
target = (readings - 60)[:, :8]
net = SensorNet()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(8):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(readings)
        loss = nn.functional.mse_loss(out, target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
