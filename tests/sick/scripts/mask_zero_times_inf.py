"""An additive mask built as a half tensor times a half constant: -1e9 becomes -inf there, and 0 * -inf is nan."""

import torch
from torch import nn

torch.manual_seed(7)


class MaskedAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.register_buffer("large", torch.full((1,), 1e9))

    def forward(self, x, pad):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        bias = pad[:, None].to(q.dtype) * -self.large.to(q.dtype)  # sick: PA103|PA201 module=decoder.attn
        return (scores + bias).softmax(-1) @ v


class Decoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = MaskedAttention(dim)
        self.mlp = nn.Linear(dim, dim)

    def forward(self, x, pad):
        return x + self.mlp(self.attn(x, pad))


class Captioner(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.decoder = Decoder(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x, pad):
        return self.head(self.decoder(x, pad))


x, y = torch.randn(8, 8, 16), torch.randint(0, 8, (8, 8))
pad = torch.arange(8)[None] >= torch.randint(4, 9, (8, 1))
model = Captioner()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x, pad)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
