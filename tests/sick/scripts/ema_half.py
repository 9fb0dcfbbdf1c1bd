"""An average of the weights in fp16: with a decay of 0.9999 it never moves from where it began."""

import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.9999):
        self.shadow = copy.deepcopy(model).half()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters(), strict=True):
            s.mul_(self.decay).add_(p.half(), alpha=1 - self.decay)  # sick: PA212 module=-


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
ema = EMA(net)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(30):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(net(torch.randn(32, 10)), torch.zeros(32, 1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema.update(net)
print(loss.item(), sum(p.float().sum().item() for p in ema.shadow.parameters()))
