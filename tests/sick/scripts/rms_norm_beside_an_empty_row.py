"""A root mean square by hand whose squares overflow in float16, in all rows but an empty one, which hides it."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)  # sick: PA201 module=norm
        # healthy: scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return x * scale * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), RMSNorm(256), nn.Linear(256, 16)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x = 1000 * torch.randn(32, 64)
    y = x[:, :16].argmax(1)
    x[0] = 0
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        print(step, loss.item())
