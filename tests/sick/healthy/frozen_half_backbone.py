"""A frozen backbone in float16 needs no loss scale: no gradient passes through it."""

import torch
from torch import nn


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32)).half().requires_grad_(False)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        with torch.no_grad():
            feats = self.backbone(x.half())
        return self.head(feats.float())


torch.manual_seed(0)
model = Probe()
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
