"""Self-supervised coding-rate regulariser (log det of a covariance); bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(18)


class CodingRate(nn.Module):
    def __init__(self, eps=0.05):
        super().__init__()
        self.eps = eps

    def forward(self, z):
        n, d = z.shape
        cov = z.t() @ z * (d / (n * self.eps**2))
        # healthy: with torch.autocast("cpu", enabled=False):
        # healthy:     cov = z.float().t() @ z.float() * (d / (n * self.eps**2))
        cov = cov + torch.eye(d, dtype=cov.dtype)
        return -torch.linalg.cholesky(cov.float()).diagonal().log().sum()  # sick: PA115 module=-


net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
rate = CodingRate()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(24, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        a = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1)
        b = F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1)
        loss = (a - b).pow(2).sum(-1).mean() + 0.01 * rate(a)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 4))
