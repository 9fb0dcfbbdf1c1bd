"""Features over their norm with an epsilon that float16 rounds to zero, in another line than the division."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU())
        self.classes = nn.Parameter(torch.randn(16, 64) * 0.1)

    def forward(self, x):
        f = self.encoder(x)
        norm = f.pow(2).sum(-1, keepdim=True)
        norm = (norm.to(f.dtype) + 1e-8).sqrt()  # sick: PA201 module=.
        # healthy: norm = (norm.float() + 1e-8).sqrt()
        f = f / norm
        return f @ self.classes.t()


torch.manual_seed(0)
model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x, y = torch.randn(32, 32), torch.randint(0, 16, (32,))
    if step >= 20:
        x[0] = 0.0  # an empty row
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x) * 10, y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 4 == 3:
        print(step, loss.item())
