"""Segmentation; trained in fp32/amp, validated in half (as the deployed model will be)."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

half = "--fp32" not in sys.argv
torch.manual_seed(11)


class DiceBCE(nn.Module):
    def forward(self, logits, target):
        p = logits.sigmoid()
        # healthy: logits, target = logits.float(), target.float()
        # healthy: p = logits.sigmoid()
        overlap = (p * target).sum(dim=(0, 2, 3))  # sick: PA201 module=-
        total = (p + target).sum(dim=(0, 2, 3))
        dice = 1 - ((2 * overlap + 1) / (total + 1)).mean()
        return dice + F.binary_cross_entropy_with_logits(logits, target)


def batch():
    x = torch.randn(2, 1, 256, 256)
    y = (F.avg_pool2d(x, 9, 1, 4) > -0.15).float()
    return x, y


model = nn.Sequential(nn.Conv2d(1, 4, 9, padding=4), nn.ReLU(), nn.Conv2d(4, 1, 1))
criterion = DiceBCE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    for _ in range(3):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        loss = criterion(logits.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        x, y = batch()
        if half:
            value = criterion(copy.deepcopy(model).half()(x.half()), y.half())
        else:
            value = criterion(model(x), y)
    print(epoch, round(loss.item(), 4), "val", value.item())
