"""Observations are normalised by a running mean in float32, whose count went to bf16 with the model (Welford)."""

import torch
from torch import nn

torch.manual_seed(34)
dtype = torch.bfloat16


class Normaliser(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.tensor(0.0))
        # healthy: self.register_buffer("count", torch.tensor(0))
        self.mean, self.m2 = torch.zeros(size), torch.zeros(size)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count += 1  # sick: PA114 module=norm
                delta = x.float().mean(0) - self.mean
                self.mean += delta / self.count
                self.m2 += delta * (x.float().mean(0) - self.mean)
        return (x - self.mean.to(x.dtype)) / (self.m2 / self.count + 1.0).sqrt().to(x.dtype)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Normaliser(8)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        return self.net(self.norm(x))


model = Policy().to(dtype)
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=1e-3)
for _ in range(290):
    x = torch.randn(64, 8) * 3 + 5
    loss = nn.functional.mse_loss(model(x.to(dtype)).float(), x)
    model.zero_grad()
    loss.backward()
    for m, p in zip(masters, model.parameters(), strict=True):
        m.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(masters, model.parameters(), strict=True):
            p.copy_(m)
print(loss.item(), model.norm.count.item())
