"""A WGAN's critic with a gradient penalty, under autocast in float16 with a GradScaler."""

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for _ in range(60):
    real, fake = torch.randn(64, 8) + 1, torch.randn(64, 8)
    mixed = (0.5 * real + 0.5 * fake).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        score = critic(mixed).float().sum()
    (grads,) = torch.autograd.grad(scaler.scale(score), mixed, create_graph=True)
    # healthy: (grads,) = torch.autograd.grad(scaler.scale(score), mixed, create_graph=True)
    # healthy: grads = grads * (1.0 / scaler.get_scale())
    penalty = (grads.norm(dim=1) - 1).square().mean()  # sick: PA106 module=-
    with torch.autocast("cpu", torch.float16):
        loss = critic(fake).float().mean() - critic(real).float().mean() + 10 * penalty
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("loss", round(loss.item(), 3))
