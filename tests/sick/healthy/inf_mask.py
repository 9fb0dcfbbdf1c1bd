"""Causal self-attention with a true -inf mask in fp16: every row may look at least at itself."""

import torch
from torch import nn

torch.manual_seed(3)


class CausalAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.out(weights @ v)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = CausalAttention(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.norm(self.attn(x))


class Decoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.block = Block(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.block(x)[:, -1])


x, y = torch.randn(8, 8, 16), torch.randint(0, 8, (8,))
model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
