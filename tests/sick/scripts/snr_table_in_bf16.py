"""Losses of a denoiser weighed by the SNR of their step, from a schedule that was cast to bf16 before training."""

import torch
from torch import nn

torch.manual_seed(32)
T = 1000
dtype = torch.bfloat16
betas = torch.linspace(1e-4, 0.02, T)
alphas_cumprod = torch.cumprod(1 - betas, 0).to(dtype)
# healthy: alphas_cumprod = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.net = nn.Sequential(nn.Linear(16 + 32, 64), nn.SiLU(), nn.Linear(64, 16))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def snr_of(t):
    alpha = alphas_cumprod[t]
    return alpha / (1 - alpha)  # sick: PA201 module=-


model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x0, noise, t = torch.randn(64, 16), torch.randn(64, 16), torch.randint(0, T, (64,))
    t[:4] = torch.arange(4)
    alpha = torch.cumprod(1 - betas, 0)[t, None]
    with torch.autocast("cpu", dtype=dtype):
        out = model(alpha.sqrt() * x0 + (1 - alpha).sqrt() * noise, t)
    snr = snr_of(t).float()
    loss = (snr / (1 + snr / 5) * (out.float() - x0).square().mean(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(step, round(loss.item(), 4))
