"""Gradient accumulation with a routing temperature annealed by each micro-batch: in the last step it reaches zero."""

import torch
from torch import nn

torch.manual_seed(49)
ACCUMULATE, STEPS = 4, 5


class Router(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        logits = self.gate(x) / self.temperature  # sick: PA201 module=moe.router
        self.temperature = self.temperature - 0.0625
        return logits.softmax(dim=-1)


class Mixture(nn.Module):
    def __init__(self, dim=16, experts=8):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.Linear(dim, experts)

    def forward(self, x):
        return self.router(x) * self.experts(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = Mixture()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.moe(x))


x, y = torch.randn(ACCUMULATE, 16, 16), torch.randint(0, 8, (ACCUMULATE, 16))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(STEPS):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(ACCUMULATE):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[micro]), y[micro]) / ACCUMULATE
        loss.backward()
        total += loss.item()
    optimizer.step()
    print(f"step {step} loss {total:.4f}")
