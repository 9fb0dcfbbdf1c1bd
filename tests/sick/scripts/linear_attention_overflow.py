"""Linear attention over long sequences; fp16."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

amp = "--fp32" not in sys.argv
torch.manual_seed(12)


class LinearAttention(nn.Module):
    def __init__(self, dim=16, eps=1e-6):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.eps = eps

    def forward(self, x):
        q, k = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1
        # healthy: q, k = (F.elu(self.q(x)) + 1).float(), (F.elu(self.k(x)) + 1).float()
        kv = torch.einsum("nld,nlm->nmd", k, self.v(x))
        # healthy: k, v = k / k.shape[1], self.v(x).float()
        # healthy: with torch.autocast("cpu", enabled=False):
        # healthy:     kv = torch.einsum("nld,nlm->nmd", k, v)
        z = 1 / (torch.einsum("nld,nd->nl", q, k.sum(dim=1)) + self.eps)  # sick: PA201 module=attn
        # healthy:     z = 1 / (torch.einsum("nld,nd->nl", q, k.sum(dim=1)) + self.eps)
        return torch.einsum("nld,nmd,nl->nlm", q, kv, z)
        # healthy:     return torch.einsum("nld,nmd,nl->nlm", q, kv, z)


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = LinearAttention(dim)
        self.head = nn.Linear(dim, 1)

    def forward(self, x):
        return self.head(x + self.attn(4 * self.norm(x)))


model = Block()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", enabled=amp, init_scale=256.0)
for step in range(12):
    n = 256 if step % 4 else 4096
    x = torch.randn(1, n, 16)
    y = x.mean(dim=1, keepdim=True)[..., :1].expand(1, n, 1)
    with torch.autocast("cpu", torch.float16, enabled=amp):
        loss = F.mse_loss(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, n, round(loss.item(), 4), scaler.get_scale())
