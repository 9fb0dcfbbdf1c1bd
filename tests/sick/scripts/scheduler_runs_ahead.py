"""A one-cycle schedule that moves every iteration while a scaler, started far too high, skips most (pytorch#67590)."""

import torch
from torch import nn

torch.manual_seed(20)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


STEPS = 12
x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS + 1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
for step in range(STEPS):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # sick: PA108 module=-
    print(f"step {step} lr {scheduler.get_last_lr()[0]:.4f} scale {scaler.get_scale():g} loss {loss.item():.4f}")
