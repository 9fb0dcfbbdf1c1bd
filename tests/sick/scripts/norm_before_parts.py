"""A training_step that calls the parts of a module whose own forward never runs; its norm divides by zero."""

import torch
from torch import nn


class Standardise(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        return (x - mean) / (x - mean).square().mean(dim=-1, keepdim=True).sqrt()  # sick: PA201 module=norm


class Lit(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Standardise()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def training_step(self, x, y):
        h = torch.relu(self.encoder(self.norm(x)))
        return nn.functional.cross_entropy(self.head(h).float(), y)


torch.manual_seed(66)
x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
x[5] = 1.0  # a constant row
model = Lit()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.training_step(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
