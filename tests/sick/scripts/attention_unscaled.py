"""Self-attention that forgot to divide by sqrt(d): its fp16 scores pass 65504 and softmax makes nan (pytorch#40497)."""

import torch
from torch import nn

torch.manual_seed(40)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.matmul(q, k.transpose(-2, -1))  # sick: PA201 module=encoder.attn
        weights = scores.softmax(dim=-1)
        return torch.matmul(weights, v)


class Encoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = Attention(dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return self.norm(self.attn(x))


class Net(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.encoder = Encoder(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, x):
        return self.head(self.encoder(x).mean(dim=1))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
x, y = 400 * torch.randn(8, 8, 64), torch.randint(0, 8, (8,))
for step in range(5):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
