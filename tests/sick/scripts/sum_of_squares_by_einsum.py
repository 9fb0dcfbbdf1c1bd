"""A sum of squares as a loss, in float16: float32 cures it, at a scale that torch's scaler comes down to."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64))
opt = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")


def sum_of_squares(a):
    return torch.einsum("bi,bi->", a, a)  # sick: PA201 module=-
    # healthy: return torch.einsum("bi,bi->", a.float(), a.float())


for step in range(24):
    x = torch.randn(256, 16)
    y = (x[:, :1] * 8).expand(-1, 64)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        d = (out - y).half()
        with torch.autocast("cpu", enabled=False):
            loss = sum_of_squares(d) / 256
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step >= 16:
        print(step, loss.item())
