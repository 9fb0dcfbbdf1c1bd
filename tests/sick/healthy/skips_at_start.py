"""A long schedule and a scaler that skips its first two steps while it finds its scale; the schedule waits for it."""

import torch
from torch import nn

torch.manual_seed(10)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
for step in range(12):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
    print(f"step {step} scale {scaler.get_scale():g} loss {loss.item():.4f}")
