"""A cube overflows in a module without parameters, which the script calls itself."""

import math

import torch
from torch import nn


class TanhGelu(nn.Module):
    def forward(self, x):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))  # sick: PA201 module=act
        return 0.5 * x * (1 + torch.tanh(inner))


torch.manual_seed(0)
net = nn.ModuleDict({"stem": nn.Linear(8, 32), "act": TanhGelu(), "head": nn.Linear(32, 1)})
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(9):
    x = torch.randn(16, 8) * (1.0 if step < 5 else 2000.0)
    with torch.autocast("cpu", dtype=torch.float16):
        h = net["act"](net["stem"](x))
        loss = nn.functional.l1_loss(net["head"](h), torch.zeros(16, 1))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item())
