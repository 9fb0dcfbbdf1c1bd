"""Adaptive gradient clipping by hand, before the scaler has unscaled; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv

torch.manual_seed(27)


@torch.no_grad()
def adaptive_clip(parameters, factor=0.02, eps=1e-3):
    for p in parameters:
        if p.grad is None:
            continue
        limit = p.norm().clamp_min(eps) * factor
        norm = p.grad.norm()
        if norm > limit:
            p.grad.mul_(limit / norm)  # sick: PA106 module=-


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=2048.0)
for step in range(40):
    x = torch.randn(64, 12)
    y = x[:, :3].argmax(1)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    # healthy: scaler.scale(loss).backward()
    # healthy: scaler.unscale_(optimizer)
    adaptive_clip(model.parameters())
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        print(step, loss.item(), scaler.get_scale())
