"""A square root of |gate| at zero inside reentrant checkpointing: an infinite slope, found where it is recomputed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attend(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, gate):
        q, k, v = self.q(x), self.k(x), self.v(x)
        w = torch.softmax(q @ k.transpose(1, 2) / 4, -1)
        g = gate.abs() ** 0.5  # sick: PA201 module=blocks.2
        return x + g * (w @ v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.gates = nn.Parameter(torch.tensor([1.0, 0.5, 0.0]))
        self.blocks = nn.ModuleList(Attend(16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        x = self.emb(ids)
        for g, block in zip(self.gates, self.blocks, strict=True):
            x = checkpoint(block, x, g, use_reentrant=True)
        return self.head(x)


torch.manual_seed(11)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(6):
    ids = torch.randint(0, 50, (4, 10))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
