"""One attention layer with rotary positions, in bf16 throughout."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(9)
T, V, BACK = 640, 16, 3


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))
        # healthy: self.dim, self.base = dim, base

    def forward(self, x):
        t = torch.arange(x.shape[1]).type_as(self.inv_freq)
        # healthy: inv_freq = 1.0 / self.base ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angle = torch.outer(t, self.inv_freq)
        # healthy: angle = torch.outer(torch.arange(x.shape[1]).float(), inv_freq)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # sick: PA114 module=rotary
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Layer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(V, dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.rotary = Rotary(dim)
        self.head = nn.Linear(dim, V)

    def forward(self, ids):
        h = self.embed(ids)
        one = torch.ones_like(h)
        q, k = self.rotary(self.q(one)), self.rotary(self.k(one))
        return self.head(self.out(F.scaled_dot_product_attention(q, k, self.v(h), is_causal=True)))


model = Layer().to(dtype)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=1e-2)
for step in range(80):
    ids = torch.randint(0, V, (2, T))
    target = ids.roll(BACK, 1)
    logits = model(ids).float()
    loss = F.cross_entropy(logits[:, 400:].flatten(0, 1), target[:, 400:].flatten())
    model.zero_grad()
    loss.backward()
    for m, p in zip(master, model.parameters(), strict=True):
        m.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters(), strict=True):
            p.copy_(m)
    if step % 40 == 39:
        print(step, round(loss.item(), 4))
