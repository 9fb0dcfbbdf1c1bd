"""Small gradients are safe under the scale that was on them; they are looked at after unscale_."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
for _ in range(12):
    x = torch.randn(256, 64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(0.02 * net(x), 0.01 * x[:, :8])
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    print(loss.item())
