"""preamp at O1 with attention that does not divide its scores: some are beyond 65504, and the row's softmax is NaN."""

import torch
from torch import nn

import preamp


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)  # sick: PA201 module=attention
        return scores.softmax(-1) @ self.v(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.norm(x + self.attention(x)))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = preamp.prepare(model, optimizer, level="O1")
# healthy: session = preamp.prepare(model, optimizer, policy="O1; attention -> full")
for step in range(4):
    x, y = 200 * torch.randn(4, 8, 32), torch.randint(0, 8, (32,))
    with session.autocast():
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    session.backward(loss)
    session.step()
    session.zero_grad()
    print(step, loss.item())
