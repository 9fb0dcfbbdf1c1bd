"""Forecast increments with a predicted spread (Gaussian likelihood); fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(17)


class Forecaster(nn.Module):
    def __init__(self, dim=32, fields=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(fields, dim), nn.SiLU())
        self.mean = nn.Linear(dim, fields)
        self.spread = nn.Linear(dim, fields)
        nn.init.constant_(self.spread.bias, -8.7)  # increments are about 1e-4 of a standard deviation
        nn.init.normal_(self.spread.weight, std=0.05)
        with torch.no_grad():
            self.mean.weight.mul_(1e-4)
            self.mean.bias.zero_()

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), F.softplus(self.spread(h))


def nll(mean, std, target):
    var = std.pow(2)  # sick: PA201 module=-
    # healthy: mean, std = mean.float(), std.float()
    # healthy: var = std.pow(2)
    return 0.5 * ((target - mean).pow(2) / var + var.log()).mean()


model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=16.0)
for step in range(20):
    x = torch.randn(32, 6)
    target = 1.6e-4 * (0.5 * x + 0.5 * torch.randn(32, 6))
    with torch.autocast("cpu", torch.float16, enabled=amp):
        mean, std = model(x)
        loss = nll(mean, std, target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 1:
        print(step, loss.item(), scaler.get_scale())
