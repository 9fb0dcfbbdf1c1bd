"""A traffic model that integrates 4096 rates by cumsum in fp16, where neighbours differ by less than a bit."""

import torch
from torch import nn

torch.manual_seed(9)


class Integrator(nn.Module):
    def forward(self, rates):
        return rates.cumsum(dim=1)  # sick: PA104 module=integrate
        # healthy: return rates.float().cumsum(dim=1)


class Traffic(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(8, 8)
        self.integrate = Integrator()

    def forward(self, x):
        rates = torch.sigmoid(self.rate(x))
        return self.integrate(rates)


x = torch.randn(2, 4096, 8)
total = torch.sigmoid(x.roll(1, -1)).cumsum(dim=1)
model = Traffic()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = nn.functional.l1_loss(pred.float(), total) / 1000
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
