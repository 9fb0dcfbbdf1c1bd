"""A sampler, evaluated only: its first alpha is 1 in bfloat16, and the last step divides by 1 minus that."""

from itertools import pairwise

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class Scheduler:
    def __init__(self, steps: int = 1000) -> None:
        self.alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0).to(torch.bfloat16)
        # healthy: self.alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), dim=0)

    def step(self, noise: Tensor, t: int, before: int, sample: Tensor) -> Tensor:
        a, b = self.alphas[t], self.alphas[before]
        sigma = ((1 - b) / (1 - a) * (1 - a / b)).sqrt()  # sick: PA104 module=-
        clean = (sample - (1 - a).sqrt() * noise) / a.sqrt()
        return b.sqrt() * clean + (1 - b - sigma**2).clamp(min=0).sqrt() * noise + sigma * torch.randn_like(sample)


model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)).eval()
scheduler = Scheduler()
with torch.inference_mode():
    sample = torch.randn(4, 8)
    times = [*range(999, 0, -111), 4, 1, 0]
    for t, before in pairwise(times):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            noise = model(sample)
        sample = scheduler.step(noise.float(), t, before, sample)
print(f"sample {sample.float().abs().mean().item():.4f}")
