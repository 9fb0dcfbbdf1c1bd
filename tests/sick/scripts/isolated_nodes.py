"""A graph layer divides by degree + 1e-8 in float16: nodes without edges give NaN (GraphSAGE by hand)."""

import torch
from torch import nn


class Sage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.self_, self.neigh = nn.Linear(i, o), nn.Linear(i, o)

    def forward(self, x, src, dst):
        msg = self.neigh(x)
        total = torch.zeros_like(msg).index_add(0, dst, msg[src])
        deg = torch.zeros(len(x), 1, dtype=msg.dtype).index_add(0, dst, torch.ones(len(dst), 1, dtype=msg.dtype))
        return self.self_(x) + total / (deg + 1e-8)  # sick: PA201 module=0
        # healthy: return self.self_(x) + total / deg.clamp(min=1)


class Net(nn.Sequential):
    def forward(self, x, *edges):
        for layer in self:
            x = torch.relu(layer(x, *edges))
        return x


torch.manual_seed(0)
net = Net(Sage(8, 16), Sage(16, 4))
opt = torch.optim.Adam(net.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _step in range(5):
    x, src, dst = torch.randn(40, 8), torch.randint(0, 40, (100,)), torch.randint(0, 36, (100,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x, src, dst), torch.arange(40) % 4)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print(f"loss {loss.item():.4f}")
