"""Mish by hand in a float16 model with float32 masters: the forward pass is fine, backward is not."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv

torch.manual_seed(32)


class Mish(nn.Module):
    def forward(self, x):
        return x * torch.tanh(torch.log(1 + torch.exp(x)))  # sick: PA201 module=1
        # healthy: return (x * torch.tanh(torch.log(1 + torch.exp(x.float())))).to(x.dtype)


model = nn.Sequential(nn.Linear(10, 64), Mish(), nn.Linear(64, 64), Mish(), nn.Linear(64, 1)).to(
    torch.float16 if amp else torch.float32
)
masters = [p.detach().float().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=1e-3)
for step in range(15):
    x = 6 * torch.randn(64, 10)
    y = x.abs().sum(1, keepdim=True)
    loss = F.smooth_l1_loss(model(x.to(model[0].weight.dtype)).float(), y)
    model.zero_grad()
    (32 * loss).backward()
    grads = [p.grad.float() / 32 for p in model.parameters()]
    if all(g.isfinite().all() for g in grads):
        for m, g in zip(masters, grads, strict=True):
            m.grad = g
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters(), strict=True):
                p.copy_(m)
    else:
        print("skipped")
    print(step, loss.item())
