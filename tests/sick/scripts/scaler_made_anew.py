"""A train_step that makes its own GradScaler: each begins at the first scale and forgets the overflow before it."""

import torch
from torch import nn

torch.manual_seed(35)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
kept = torch.amp.GradScaler("cpu")


def train_step(x, y):
    scaler = torch.amp.GradScaler("cpu")  # sick: PA203 module=-
    # healthy: scaler = kept
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = 40 * nn.functional.mse_loss(out.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


for step in range(30):
    x = torch.randn(64, 16)
    loss = train_step(x, 30 * x[:, :8])
    print(step, round(loss.item(), 4))
