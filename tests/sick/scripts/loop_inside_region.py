"""The whole training loop sits inside one region: cached 16-bit weights are reused and no update is ever seen."""

import torch
from torch import nn

torch.manual_seed(24)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for step in range(6):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # sick: PA110 module=-
        print(step, loss.item())
