"""A norm that is cast to float16 before its epsilon: float32 is enough at a lower scale, and the epsilon stays."""

import torch
from torch import nn


class Cosine(nn.Module):
    def forward(self, f):
        norm = (f * f).sum(-1, keepdim=True).half()
        return f / torch.sqrt(norm + 1e-8)  # sick: PA201 module=1
        # healthy: return f.float() / torch.sqrt(norm.float() + 1e-8)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64, bias=False), Cosine(), nn.Linear(64, 16))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    x, y = torch.randn(32, 32), torch.randint(0, 16, (32,))
    if step >= 20:
        x[0] = 0
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 4 == 3:
        print(step, loss.item())
