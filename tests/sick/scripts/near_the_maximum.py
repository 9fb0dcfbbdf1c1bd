"""A regression whose hidden activations sit at 20000 to 60000 in fp16: finite, with no room left."""

import torch
from torch import nn

torch.manual_seed(65)


class Expand(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        nn.init.eye_(self.proj.weight)

    def forward(self, x):
        return self.proj(x)  # sick: PA205 module=encoder.expand.proj line=any


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.expand = Expand(dim)

    def forward(self, x):
        return torch.tanh(self.expand(x) / 32768)


class Net(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = Encoder(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x = (20000 + 30000 * torch.rand(32, 16)) * torch.randn(32, 16).sign()
y = torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
