"""Two optimizers: one is unscaled, and the gradients of both are clipped together."""

import torch
from torch import nn

torch.manual_seed(0)
backbone, head = nn.Linear(12, 24), nn.Linear(24, 3)
slow = torch.optim.SGD(backbone.parameters(), lr=1e-2)
fast = torch.optim.SGD(head.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
for _ in range(12):
    slow.zero_grad()
    fast.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(head(torch.relu(backbone(torch.randn(16, 12)))), torch.randint(0, 3, (16,)))
    scaler.scale(loss).backward()
    scaler.unscale_(slow)
    nn.utils.clip_grad_norm_([*backbone.parameters(), *head.parameters()], 1.0)  # sick: PA106 module=-
    scaler.step(slow)
    scaler.step(fast)
    scaler.update()
    print(loss.item())
