"""Domain adaptation by an RBF maximum mean discrepancy, with distances expanded; bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv

torch.manual_seed(9)


class MMD(nn.Module):
    def forward(self, x, y):
        z = torch.cat([x, y])
        # healthy: z = torch.cat([x, y]).float()
        sq = (z * z).sum(1)
        d2 = sq[:, None] + sq[None] - 2 * z @ z.t()  # sick: PA104 module=-
        # healthy: d2 = (z[:, None] - z[None]).square().sum(-1)
        k = torch.exp(-d2 / (2 * 0.5**2))
        n = len(x)
        return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


model = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 32))
with torch.no_grad():
    model[2].bias.add_(5.0)
    model[2].weight.mul_(0.3)
head, mmd = nn.Linear(32, 3), MMD()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
for step in range(30):
    a = torch.randn(48, 12)
    b = torch.randn(48, 12) + 0.5
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        fa, fb = model(a), model(b)
        penalty = mmd(fa, fb)
        loss = F.cross_entropy(head(fa), a[:, :3].argmax(1)) + penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(step, loss.item(), "mmd", penalty.item())
