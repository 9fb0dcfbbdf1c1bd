"""Autoencoder whose norm is built on F.normalize; zero padding in time; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(10)


class RMSNorm1d(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma  # sick: PA201 module=norm
        # healthy: return F.normalize(x.float(), dim=1, eps=1e-2) * self.scale * self.gamma


class AutoEncoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.enc = nn.Conv1d(4, dim, 3, bias=False)
        self.norm = RMSNorm1d(dim)
        self.dec = nn.Conv1d(dim, 4, 3, padding=1)

    def forward(self, x):
        x = F.pad(x, (4, 0))  # causal: zeros before the first frame
        return self.dec(F.silu(self.norm(self.enc(x))))[..., 2:]


model = AutoEncoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=1024.0)
for step in range(12):
    x = torch.randn(8, 4, 20)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        loss = F.mse_loss(model(x).float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, round(loss.item(), 4), scaler.get_scale())
