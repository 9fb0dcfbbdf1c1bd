"""bf16 weights, float32 masters, gradients accumulated over many micro batches."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(16)
MICRO = 1024
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.SGD(master, lr=0.05, momentum=0.9)
task = torch.randn(8, 1)
for step in range(2):
    optimizer.zero_grad()
    for m in master:
        m.grad = torch.zeros_like(m)
    total = 0.0
    for _ in range(MICRO):
        x = torch.randn(2, 8)
        loss = F.mse_loss(model(x.to(dtype)).float(), torch.tanh(x @ task) + 1) / MICRO
        model.zero_grad()
        loss.backward()
        for m, p in zip(master, model.parameters(), strict=True):
            m.grad += p.grad.float()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(master, 10.0).item()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters(), strict=True):
            p.copy_(m)
    print(step, round(total, 5), "norm", round(norm, 4))
