"""A GAN with one scaler: the generator's loss leaves gradients in the discriminator, cleared before use."""

import torch
from torch import nn

torch.manual_seed(0)
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
og, od = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.99)) for m in (G, D))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
bce = nn.BCEWithLogitsLoss()
for it in range(25):
    real, z = torch.randn(32, 16) + 1, torch.randn(32, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(z)
        d_loss = bce(D(real), torch.ones(32, 1)) + bce(D(fake.detach()), torch.zeros(32, 1))
    od.zero_grad()
    scaler.scale(d_loss).backward()
    scaler.step(od)
    with torch.autocast("cpu", dtype=torch.float16):
        g_loss = bce(D(fake), torch.ones(32, 1))
    og.zero_grad()
    scaler.scale(g_loss).backward()
    scaler.step(og)
    scaler.update()
    if it % 5 == 0:
        print(it, d_loss.item(), g_loss.item())
