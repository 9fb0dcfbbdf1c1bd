"""A signed-root activation by torch.where: the branch not taken is nan, and 0 * nan comes back."""

import torch
from torch import nn

torch.manual_seed(46)


class RootActivation(nn.Module):
    def forward(self, x):
        root = x**0.5  # sick: PA201 module=trunk.act
        # healthy: positive = x > 0.01
        return torch.where(x > 0, root, 0.1 * x)
        # healthy: root = torch.where(positive, x, torch.ones_like(x)).sqrt()
        # healthy: return torch.where(positive, root, 0.1 * x)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)
        self.act = RootActivation()

    def forward(self, x):
        return self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.trunk(x))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for it in range(5):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(f"{it} scale {scaler.get_scale():g} loss {loss.item():.4f}")
