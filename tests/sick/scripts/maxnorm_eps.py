"""A classifier whose own normalisation layer guards its division with 1e-8 in an fp16 region; a row is padding."""

import torch
from torch import nn

torch.manual_seed(1)


class MaxNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        peak = x.abs().amax(dim=-1, keepdim=True)
        # healthy: full = x.float()
        return self.gain * (x / (peak + 1e-8))  # sick: PA101|PA201 module=encoder.norm
        # healthy: peak = full.abs().amax(dim=-1, keepdim=True)
        # healthy: return (self.gain * (full / (peak + 1e-8))).to(x.dtype)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 32, bias=False)
        self.norm = MaxNorm(32)

    def forward(self, x):
        return self.norm(self.proj(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
x[-1] = 0
net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for it in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(it, round(loss.item(), 4))
