"""Autoencoder with 1 - SSIM as its loss, all in a bf16 region; smooth bright images."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(10)
window = torch.ones(1, 1, 7, 7) / 49


def ssim(a, b, c1=0.01**2, c2=0.03**2):
    mean_a, mean_b = F.conv2d(a, window), F.conv2d(b, window)
    var_a = F.conv2d(a * a, window) - mean_a * mean_a  # sick: PA104 module=-
    var_b = F.conv2d(b * b, window) - mean_b * mean_b
    cov = F.conv2d(a * b, window) - mean_a * mean_b
    top = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return (top / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x):
        return x + 0.1 * self.b(F.silu(self.a(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
ramp = torch.linspace(0, 1, 24)
for step in range(12):
    image = 0.8 + 0.05 * torch.sin(6 * ramp[:, None] + torch.rand(4, 1, 1, 1)) * torch.cos(5 * ramp[None])
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out = model(image)
        loss = 1 - ssim(out, image)
        # healthy: with torch.autocast("cpu", enabled=False):
        # healthy:     loss = 1 - ssim(out.float(), image)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
