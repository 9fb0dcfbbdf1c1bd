"""Gradients over two micro-batches, whose losses are scaled and then divided, and two scaled losses that are added."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for step in range(40):
    optimizer.zero_grad()
    if step % 2:
        for _ in range(2):
            x = torch.randn(32, 16)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = 10 * model(x).float().square().mean()
            (scaler.scale(loss) / 2).backward()
    else:
        x = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x).float()
            loss, penalty = 10 * out.square().mean(), out.abs().mean()
        (scaler.scale(loss) + 0.1 * scaler.scale(penalty)).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        print(step, loss.item(), scaler.get_scale())
