"""Blocks that begin with a scale of 1e-6 each (LayerScale), evaluated in bfloat16 by a loop of the script's."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.full((64,), 1e-6))

    def forward(self, x):
        return self.body(x) * self.scale


blocks, head = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(64, 1)
optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=1e-3)


def run(x):
    with torch.autocast("cpu", torch.bfloat16):
        x = x.bfloat16()
        for block in blocks:
            x = x + block(x).bfloat16()
        return head(x).float()


for step in range(40):
    x = torch.randn(128, 64)
    loss = F.mse_loss(run(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        with torch.no_grad():
            print("val", F.mse_loss(run(x), x.sum(1, keepdim=True)).item())
