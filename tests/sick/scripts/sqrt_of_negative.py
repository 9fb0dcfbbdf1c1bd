"""A standardiser in a bf16 region: E[x^2] - E[x]^2 rounds below zero and its square root is nan."""

import torch
from torch import nn

torch.manual_seed(41)


class Standardise(nn.Module):
    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        var = (x * x).mean(dim=-1, keepdim=True) - mean * mean  # sick: PA201 module=encoder.norm
        std = torch.sqrt(var)
        return (x - mean) / (std + 1e-3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.add_module("proj", nn.Linear(16, 32))
        self.encoder.add_module("norm", Standardise())
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


model = Net()
nn.init.constant_(model.encoder.proj.bias, 20.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
