"""Policy with a lagged copy of its adapters (kept in bf16 to save memory)."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

store = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(5)


class Adapter(nn.Module):
    def __init__(self, dim, rank=4):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.b = nn.Parameter(torch.randn(dim, rank) * 0.1)

    def forward(self, x):
        return x @ self.a.t() @ self.b.t()


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.adapters = nn.ModuleDict({"default": Adapter(dim), "old": Adapter(dim)})

    def forward(self, x, which="default"):
        return self.base(x) + self.adapters[which](x)


policy = Policy()
policy.adapters["old"].load_state_dict(policy.adapters["default"].state_dict())
for name, p in policy.named_parameters():
    p.requires_grad_("default" in name)
    if not p.requires_grad:
        p.data = p.data.to(store)
        # healthy: p.data = p.data.to(torch.float32 if "old" in name else store)
optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=2e-3)
task = torch.randn(32, 32) / 6


def update_lagged(mix=0.999):
    for t, s in zip(policy.adapters["old"].parameters(), policy.adapters["default"].parameters(), strict=True):
        t.data.mul_(mix).add_(s.detach().data, alpha=1.0 - mix)  # sick: PA212 module=-


start = [p.detach().float().clone() for p in policy.adapters["old"].parameters()]
for step in range(400):
    x = torch.randn(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(policy(x).float(), x @ task)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_lagged()
    if step % 100 == 99:
        moved = sum((p.float() - q).norm() for p, q in zip(policy.adapters["old"].parameters(), start, strict=True))
        print(step, round(loss.item(), 4), "lagged copy moved by", round(moved.item(), 4))
