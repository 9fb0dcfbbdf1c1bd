"""The signed-root activation with the safe double where: the root never sees a number that it cannot take."""

import torch
from torch import nn

torch.manual_seed(13)


class RootActivation(nn.Module):
    def forward(self, x):
        positive = x > 0.01
        root = torch.where(positive, x, torch.ones_like(x)).sqrt()
        return torch.where(positive, root, 0.1 * x)


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
for it in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(it, loss.item())
