"""Steps whose gradients are not finite are left out by hand, and scaler.update() with them: the scale never falls."""

import torch
from torch import nn

torch.manual_seed(65)
x, y = torch.randn(64, 16), torch.randint(0, 8, (64,))
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)  # sick: PA107 module=-
for step in range(24):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        scaler.step(optimizer)
        scaler.update()
    print(step, loss.item())
