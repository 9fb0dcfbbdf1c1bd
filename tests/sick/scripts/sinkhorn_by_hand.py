"""Matching by Sinkhorn's iteration: kernel exp(-cost / 0.05), in a float16 region."""

import sys

import torch
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(6)


def plan(cost, reg=0.05, rounds=8):
    kernel = torch.exp(-cost / reg)
    u = torch.ones_like(kernel[:, 0])
    for _ in range(rounds):
        v = 1 / (kernel.T @ u)  # sick: PA201 module=-
        u = 1 / (kernel @ v)
    return u[:, None] * kernel * v[None]


net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=64.0)
for step in range(8):
    x = torch.randn(12, 8)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        a = net(x)
        a = a / (a.norm(dim=1, keepdim=True) + 1e-3)
        b = torch.nn.functional.normalize(x[:, :4].float(), dim=1)
        cost = 1 - (a @ b.T)
        loss = (plan(cost).float() * cost.float()).sum() / 12
        # healthy: with torch.autocast("cpu", enabled=False):
        # healthy:     loss = (plan(cost.float()) * cost.float()).sum() / 12
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
