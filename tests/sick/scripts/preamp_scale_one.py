"""preamp at O2 with its loss scale pinned to 1: behind a tiny head, the encoder's gradients flush to zero."""

import torch
from torch import nn

import preamp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 64)
        self.head = nn.Linear(64, 8)
        nn.init.normal_(self.head.weight, std=1e-4)

    def forward(self, x):
        return self.head(torch.tanh(self.encoder(x)))


torch.manual_seed(61)
x = torch.randn(128, 16)
target = 0.01 * x[:, :8]
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = preamp.prepare(model, optimizer, level="O2", scale=1.0)  # sick: PA202 module=encoder line=any
for step in range(6):
    with session.autocast():
        loss = nn.functional.mse_loss(model(x), target)
    session.backward(loss)
    session.step()
    session.zero_grad()
    print(step, loss.item())
