"""Two models: one in float32 without a scale, one in float16 with a scaler; each is stepped its own way."""

import torch
from torch import nn

torch.manual_seed(0)
a, b = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
oa = torch.optim.SGD(a.parameters(), lr=0.01)
ob = torch.optim.SGD(b.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(20):
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    oa.zero_grad(set_to_none=False)
    ob.zero_grad(set_to_none=False)
    loss_a = nn.functional.mse_loss(a(x), y)
    with torch.autocast("cpu", dtype=torch.float16):
        loss_b = nn.functional.mse_loss(b(x), y)
    loss_a.backward()
    scaler.scale(loss_b).backward()
    oa.step()
    scaler.unscale_(ob)
    nn.utils.clip_grad_norm_((p for p in b.parameters()), 1.0)
    scaler.step(ob)
    scaler.update()
print(loss_a.item(), loss_b.item())
