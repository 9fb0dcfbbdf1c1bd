"""A gradient penalty as torch's documentation has it, and a softplus in float16, which does not overflow."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 30), nn.Softplus(), nn.Linear(30, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for it in range(15):
    x, y = torch.randn(16, 10), torch.randn(16, 1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x), y)
    scaled = torch.autograd.grad(scaler.scale(loss), net.parameters(), create_graph=True)
    inv = 1.0 / scaler.get_scale()
    grads = [g * inv for g in scaled]
    with torch.autocast("cpu", dtype=torch.float16):
        penalty = sum(g.pow(2).sum() for g in grads).sqrt()
        loss = loss + 0.1 * penalty
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(it, loss.item())
