"""Feed-forward layers under torch.utils.checkpoint, which recomputes in the region's dtype, with accumulation."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(15)


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.layers = nn.ModuleList([FeedForward(dim), FeedForward(dim)])
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


x, y = torch.randn(2, 16, 16), torch.randint(0, 8, (2, 16))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(6):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x[micro]), y[micro]) / 2
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {total:.4f}")
