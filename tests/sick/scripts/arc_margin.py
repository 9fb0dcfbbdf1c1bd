"""Angular-margin head; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(21)


class ArcHead(nn.Module):
    def __init__(self, dim=16, classes=8, margin=0.3, scale=16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim))
        self.margin, self.scale = margin, scale

    def forward(self, h, y):
        cosine = F.linear(F.normalize(h), F.normalize(self.weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        # healthy: cosine = F.linear(F.normalize(h), F.normalize(self.weight)).float().clamp(-1 + 1e-4, 1 - 1e-4)
        angle = torch.acos(cosine)  # sick: PA201 module=-
        target = F.one_hot(y, cosine.shape[1]).bool()
        return self.scale * torch.where(target, (angle + self.margin).cos(), cosine)


trunk, head = nn.Linear(16, 16), ArcHead()
optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.05)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=64.0)
with torch.no_grad():
    nn.init.eye_(trunk.weight)
    trunk.bias.zero_()
centres = head.weight.detach().clone()
for step in range(16):
    y = torch.randint(0, 8, (32,))
    x = centres[y] + 0.02 * torch.randn(32, 16)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        loss = F.cross_entropy(head(trunk(x), y).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 3 == 0:
        print(step, round(loss.item(), 4), scaler.get_scale())
