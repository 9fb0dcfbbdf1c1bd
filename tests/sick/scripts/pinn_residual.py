"""Physics-informed net with a sinc basis; torch.where guards the forward pass but not the backward."""

import torch
from torch import nn


class SincBasis(nn.Module):
    def __init__(self, n=21):
        super().__init__()
        self.register_buffer("center", torch.linspace(0, 1, n))
        self.width = nn.Parameter(torch.full((n,), 12.0))

    def forward(self, t):
        u = self.width * (t - self.center)
        return torch.where(u == 0, torch.ones_like(u), torch.sin(u) / u)  # sick: PA201 module=basis


class PINN(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = SincBasis()
        self.head = nn.Sequential(nn.Linear(21, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t):
        return self.head(self.basis(t))


def residual(model, t):
    t = t.detach().clone().requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u = model(t)
    (du,) = torch.autograd.grad(u.float().sum(), t, create_graph=True)
    return (du + u.float()).square().mean()


torch.manual_seed(4)
model = PINN()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(6):
    points = torch.rand(32, 1) * 0.98 + 0.01
    loss = residual(model, points)
    if step >= 3:  # the initial condition u(0) = 1 joins after the warm-up
        loss = loss + 10 * (model(torch.zeros(1, 1)) - 1).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
