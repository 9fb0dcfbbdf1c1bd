"""ALiBi: distances between positions of 16-bit numbers; bf16 model, 1500 tokens."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.qkv, self.slope = nn.Linear(dim, 3 * dim), 0.5

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1], dtype=x.dtype)
        # healthy: place = torch.arange(x.shape[1])
        bias = -self.slope * (place[:, None] - place[None]).abs()  # sick: PA114|PA104 module=attention line=any
        scores = q @ k.transpose(1, 2) / 4 + bias.to(x.dtype)
        return scores.float().softmax(-1).to(x.dtype) @ v


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(30, 16), Attention(), nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.attention(self.embed(ids)))


model = Net().to(dtype)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=1e-2)
for step in range(6):
    ids = torch.randint(0, 30, (1, 1500))
    loss = F.cross_entropy(model(ids)[0].float(), ids[0])
    model.zero_grad()
    loss.backward()
    for m, p in zip(master, model.parameters(), strict=True):
        m.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters(), strict=True):
            p.copy_(m)
    print(step, loss.item())
