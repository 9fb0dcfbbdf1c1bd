"""Causal attention with left padding: the first rows may look at nothing, and softmax over all -inf is nan."""

import torch
from torch import nn

torch.manual_seed(53)


class CausalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, keep):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        allowed = torch.ones(x.shape[1], x.shape[1]).tril().bool() & keep[:, None]
        scores = scores.masked_fill(~allowed, float("-inf"))
        weights = scores.softmax(dim=-1)  # sick: PA201 module=block.attn
        return self.out(weights @ v)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = CausalAttention(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, keep):
        return x + self.norm(self.attn(x, keep))


class Decoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.block = Block(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x, keep):
        return self.head(self.block(x, keep)[:, -1])


x, y = torch.randn(8, 8, 16), torch.randint(0, 8, (8,))
keep = torch.arange(8)[None] >= torch.randint(0, 4, (8, 1))
model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x, keep), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
