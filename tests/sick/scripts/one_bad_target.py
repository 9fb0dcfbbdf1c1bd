"""House prices in bf16: one price of the fourth batch is missing and was read as nan."""

import torch
from torch import nn


class PriceModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.price = nn.Linear(32, 8)

    def forward(self, x):
        return self.price(self.body(x))


def batches(count=8):
    for i in range(count):
        x = torch.randn(16, 16)
        y = x[:, :8].sum(dim=1, keepdim=True).expand(16, 8).clone()
        if i == 3:
            y[2] = float("nan")
        yield x, y


torch.manual_seed(68)
model = PriceModel()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for i, (x, y) in enumerate(batches()):  # sick: PA207 module=- line=any
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.huber_loss(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    if loss.isfinite():
        optimizer.step()
    print(f"batch {i} loss {loss.item():.4f}")
