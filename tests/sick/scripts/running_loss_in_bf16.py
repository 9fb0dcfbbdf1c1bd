"""Plateau schedule driven by a running mean of the loss; bf16."""

import sys

import torch
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(20)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e-3)
for epoch in range(3):
    running = 0.0
    for _step in range(600):
        x = torch.randn(32, 16)
        y = (2 * x[:, 0] + x[:, 1] * x[:, 2] + 16).long().clamp(0, 31)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(x)
            loss = -logits.log_softmax(-1).gather(-1, y[:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()  # sick: PA212 module=-
        # healthy: running += loss.item()
    mean = (running / 600).item()
    # healthy: mean = running / 600
    schedule.step(mean)
    print(epoch, "mean loss", round(mean, 4), "last", round(loss.item(), 4), "lr", optimizer.param_groups[0]["lr"])
