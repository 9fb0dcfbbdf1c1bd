"""preamp at O2 with its own Adam, clipping and a dynamic scale."""

import torch
from torch import nn

import preamp

torch.manual_seed(17)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU())
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = preamp.optim.AdamW(model.parameters(), lr=1e-2)
with preamp.prepare(model, optimizer, level="O2") as session:
    for step in range(8):
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
        print(step, loss.item())
