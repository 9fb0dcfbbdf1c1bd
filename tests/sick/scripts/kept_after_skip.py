"""Gradients are cleared only after a step that was taken: those of a skipped one stay infinite for ever."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
opt.zero_grad()
for _ in range(40):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(torch.randn(16, 10)), torch.randint(0, 2, (16,)))
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(opt)  # sick: PA107 module=-
    scaler.update()
    if scaler.get_scale() >= before:
        opt.zero_grad()
print(loss.item(), scaler.get_scale())
