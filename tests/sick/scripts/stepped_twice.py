"""A scaler steps, and optimizer.step() below the branch steps once more."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=2.0**22)
for step in range(14):
    x = torch.randn(32, 16)
    y = x[:, :4].argmax(1)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    if amp:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
    optimizer.step()  # sick: PA107 module=-
    # healthy: pass
    print(step, loss.item())
