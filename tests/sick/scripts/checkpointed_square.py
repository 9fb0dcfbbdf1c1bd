"""Squared-ReLU feed-forward layers under torch.utils.checkpoint: the square of 300 does not fit in fp16."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(50)


class SquaredReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2  # sick: PA201 module=encoder.layers.1.act


class FeedForward(nn.Module):
    def __init__(self, dim, scale):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.act = SquaredReLU()
        self.down = nn.Linear(2 * dim, dim)
        self.up.weight.data.mul_(scale)

    def forward(self, x):
        return torch.tanh(self.down(self.act(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = nn.ModuleList([FeedForward(dim, 1.0), FeedForward(dim, 500.0)])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = Encoder(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x, y = 2 * torch.randn(16, 16), torch.randint(0, 8, (16,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
