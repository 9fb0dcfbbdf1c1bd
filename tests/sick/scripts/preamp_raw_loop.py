"""A framework's own loop around a model prepared at O5: it goes back and steps past the session, which refuses."""

import torch
from torch import nn

import preamp

torch.manual_seed(62)
x = torch.randn(64, 16)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
session = preamp.prepare(model, optimizer, level="O5")
for step in range(6):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x).float(), y.expand(64, 8))
    loss.backward()
    optimizer.step()  # sick: PA107 module=-
    optimizer.zero_grad()
    print(step, loss.item())
