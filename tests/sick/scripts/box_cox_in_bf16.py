"""Targets through a Box-Cox transform with a small exponent, in the bf16 of the batch."""

import torch
from torch import nn

torch.manual_seed(33)
LAM = 0.001
dtype = torch.bfloat16


def box_cox(x, lam):
    return (x**lam - 1) / lam  # sick: PA104 module=-
    # healthy: return (x.float() ** lam - 1) / lam


model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    x = torch.randn(128, 16)
    price = torch.exp(x[:, :1] + 0.5 * x[:, 1:2]).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), box_cox(price, LAM).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step, round(loss.item(), 4))
