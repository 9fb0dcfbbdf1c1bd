"""A float32 sum of squares on targets of a million, too steep for fp16 gradients: each step halves the scale."""

import torch
from torch import nn

torch.manual_seed(62)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x = torch.randn(32, 16)
target = x[:, :8] * 1e6
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(12):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - target).square().sum() / 100
    scaler.scale(loss).backward()  # sick: PA203 module=-
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} scale {scaler.get_scale():g} loss {loss.item():.4g}")
