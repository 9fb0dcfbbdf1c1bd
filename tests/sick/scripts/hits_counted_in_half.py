"""Accuracy of an evaluation, with hits counted one by one in the logits' dtype; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv

torch.manual_seed(15)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=1024.0)


def batch(n=48):
    x = torch.randn(n, 10)
    return x, (x[:, 0] + x[:, 1] > 0).long()


@torch.no_grad()
def evaluate():
    seen, correct = 0, None
    for _ in range(80):
        x, y = batch(47)
        with torch.autocast("cpu", torch.float16, enabled=amp):
            logits = model(x)
        hits = (logits.argmax(1) == y).to(logits.dtype)
        # healthy: hits = (logits.argmax(1) == y).float()
        if correct is None:
            correct = logits.new_zeros(())
            # healthy: correct = torch.zeros(())
        for hit in hits:
            correct += hit  # sick: PA212 module=-
        seen += len(y)
    return correct.item() / seen


for epoch in range(2):
    for _ in range(20):
        x, y = batch()
        with torch.autocast("cpu", torch.float16, enabled=amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(epoch, loss.item(), "accuracy", evaluate())
