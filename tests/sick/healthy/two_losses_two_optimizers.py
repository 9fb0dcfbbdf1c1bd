"""Two losses share a scaler; both go back before either optimizer steps."""

import torch
from torch import nn

torch.manual_seed(0)
shared = nn.Linear(12, 24)
heads = nn.ModuleList([nn.Linear(24, 3), nn.Linear(24, 1)])
o1 = torch.optim.SGD(shared.parameters(), lr=0.01)
o2 = torch.optim.Adam(heads.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for _ in range(30):
    with torch.autocast("cpu", dtype=torch.float16):
        h = torch.relu(shared(torch.randn(16, 12)))
        l1 = nn.functional.cross_entropy(heads[0](h), torch.randint(0, 3, (16,)))
        l2 = nn.functional.mse_loss(heads[1](h), torch.randn(16, 1))
    o1.zero_grad()
    o2.zero_grad()
    scaler.scale(l1).backward(retain_graph=True)
    scaler.scale(0.5 * l2).backward()
    scaler.unscale_(o1)
    norm = nn.utils.clip_grad_norm_(shared.parameters(), 1.0)
    scaler.step(o1)
    scaler.step(o2)
    scaler.update()
print(l1.item(), l2.item(), norm.item())
