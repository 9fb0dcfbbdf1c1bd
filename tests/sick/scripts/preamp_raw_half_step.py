"""O2 with an optimizer of preamp's, which may step by itself: but nothing has scaled the float16 backward pass."""

import torch
from torch import nn

import preamp

torch.manual_seed(63)
x = torch.randn(64, 16)
y = x.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = preamp.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
session = preamp.prepare(model, optimizer, level="O2")
for step in range(6):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x).float(), y.expand(64, 8))
    loss.backward()  # sick: PA107 module=-
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
