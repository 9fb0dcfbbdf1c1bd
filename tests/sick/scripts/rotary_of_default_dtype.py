"""torch.set_default_dtype(bfloat16): frequencies are made of whole numbers in it (torchtune, GPTFast)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def precompute(dim, n, base=10000):
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2) / dim))
    # healthy: freqs = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
    t = torch.arange(n)
    angles = torch.outer(t, freqs)
    return torch.cos(angles), torch.sin(angles)  # sick: PA114 module=-


class Block(nn.Module):
    def __init__(self, d=16, n=1200):
        super().__init__()
        self.emb, self.q, self.o = nn.Embedding(32, d), nn.Linear(d, d), nn.Linear(d, 32)
        self.cos, self.sin = precompute(d, n)

    def forward(self, ids):
        x = self.q(self.emb(ids))
        a, b = x.chunk(2, -1)
        r = torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1).to(x.dtype)
        return self.o(F.scaled_dot_product_attention(r, r, x, is_causal=True))


torch.set_default_dtype(torch.bfloat16)
model = Block()
opt = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-6)
for _step in range(3):
    ids = torch.randint(0, 32, (1, 1200))
    loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"loss {loss.item():.4f}")
