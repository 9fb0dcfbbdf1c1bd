"""Keypoints predicted in a bf16 region are looked up in a map of 512 pixels a side."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(12)
S = 512


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Linear(16, 2 * 8)
        self.values = nn.Parameter(torch.randn(S * S, 4))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        at = self.points(x).sigmoid().view(-1, 8, 2)
        # healthy: with torch.autocast("cpu", enabled=False):
        # healthy:     at = self.points(x).sigmoid().view(-1, 8, 2)
        cell = (at * (S - 1)).floor().long()  # sick: PA114 module=.
        seen = self.values[cell[..., 0] * S + cell[..., 1]]
        return self.head(seen.flatten(1)) + at.mean((1, 2))[:, None]


model = Sampler()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = F.mse_loss(model(x).float(), x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
