"""Two optimizers for one loss: the scaler steps one of them only."""

import torch
from torch import nn

torch.manual_seed(0)
backbone, head = nn.Linear(12, 24), nn.Linear(24, 3)
slow = torch.optim.SGD(backbone.parameters(), lr=1e-6)
fast = torch.optim.SGD(head.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
for _ in range(12):
    slow.zero_grad()
    fast.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(head(torch.relu(backbone(torch.randn(16, 12)))), torch.randint(0, 3, (16,)))
    scaler.scale(loss).backward()
    scaler.step(slow)
    fast.step()  # sick: PA107 module=-
    scaler.update()
    print(loss.item())
