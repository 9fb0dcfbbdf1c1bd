"""Self-attention whose padding mask is filled with -1e9; torch refuses that constant for fp16 scores and raises."""

import math

import torch
from torch import nn

torch.manual_seed(5)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, pad):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(pad[:, None, :], -1e9)  # sick: PA103 module=encoder.attn
        # healthy: scores = scores.masked_fill(pad[:, None, :], torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ v


class Classifier(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.encoder = nn.ModuleDict({"attn": Attention(dim)})
        self.head = nn.Linear(dim, 8)

    def forward(self, x, pad):
        return self.head(self.encoder["attn"](x, pad).mean(dim=1))


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
x, y = torch.randn(8, 8, 16), torch.randint(0, 8, (8,))
pad = torch.arange(8)[None, :] >= torch.randint(3, 8, (8, 1))
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x, pad), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
