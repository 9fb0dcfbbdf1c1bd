"""preamp at O3, which keeps no masters, with Adam's default epsilon: it is added to fp16 state and vanishes."""

import torch
from torch import nn

import preamp

torch.manual_seed(69)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # sick: PA101 module=-
with preamp.prepare(model, optimizer, level="O3", scale=1024.0) as session:
    for step in range(6):
        with session.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        session.backward(loss)
        session.step()
        session.zero_grad()
        print(step, loss.item())
