"""A gated net whose gate is a bare exponential: in fp16 exp passes 65504 at 11.1."""

import torch
from torch import nn

torch.manual_seed(44)


class ExpGate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        gate = torch.exp(self.proj(x))  # sick: PA201 module=block.gate
        return x * gate / (1 + gate)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate = ExpGate(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(self.gate(x))


class Net(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.block = Block(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.block(x))


x, y = 12 * torch.randn(32, 32), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
