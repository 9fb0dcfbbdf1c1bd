"""A model cast to bfloat16, and plain AdamW: its second moments are bfloat16, too, and cannot fall."""

import torch
from torch import nn

torch.manual_seed(64)
model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 8, bias=False)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # sick: PA211 module=.
task = torch.randn(32, 8)
for _ in range(260):
    x = torch.randn(64, 32)
    loss = (model(x.bfloat16()).float() - torch.tanh(x @ task)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
