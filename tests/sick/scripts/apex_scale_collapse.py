"""Apex at O1 with a loss that is NaN from some step on: its scale comes down by every one, and protects nothing."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt = amp.initialize(model, opt, opt_level="O1", verbosity=0)
for step in range(40):
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    if step > 9:
        x[0] = torch.nan
        # healthy: x[0] = 0
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled:  # sick: PA203 module=- line=any
        scaled.backward()
    opt.step()
print(loss.item())
