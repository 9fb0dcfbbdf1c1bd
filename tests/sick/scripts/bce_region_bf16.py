"""A discriminator with sigmoid and binary cross entropy inside a bf16 region: probabilities near 1 round to 1."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2))
        self.score = nn.Linear(64, 8)

    def forward(self, x):
        return self.score(self.features(x)).sigmoid()


disc = Discriminator()
opt = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.999))
for step in range(10):
    real, fake = torch.randn(16, 32) + 0.5, torch.randn(16, 32) - 0.5
    labels = torch.cat([torch.ones(16, 8), torch.zeros(16, 8)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = disc(torch.cat([real, fake]))
        loss = F.binary_cross_entropy(out, labels)  # sick: PA102 module=-
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step:3d} {loss.item():.4f}")
