"""An adapter that fades in after a delay; model cast to bf16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(19)


class FadeIn(nn.Module):
    def __init__(self, base, rank=4, start=300, ramp=100):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.3 * torch.randn(base.out_features, rank))
        self.b = nn.Parameter(0.3 * torch.randn(rank, base.in_features))
        self.start, self.ramp = start, ramp
        self.register_buffer("seen", torch.tensor(0.0))
        # healthy: self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.seen += 1  # sick: PA114 module=-
        u = ((self.seen - self.start) / self.ramp).clamp(0.0, 1.0)
        return self.base(x) + u * (x @ self.b.t() @ self.a.t())


model = nn.Sequential(FadeIn(nn.Linear(16, 32)), nn.GELU(), FadeIn(nn.Linear(32, 8))).to(dtype)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
task = torch.randn(16, 8)
for step in range(600):
    # healthy: for step in range(420):
    x = torch.randn(64, 16)
    loss = F.mse_loss(model(x.to(dtype)).float(), torch.tanh(x @ task))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(step, round(loss.item(), 4), "seen", model[0].seen.item())
