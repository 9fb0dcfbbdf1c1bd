"""An Apex O2 script with a squared activation that leaves fp16; Apex halves its scale at each step (apex#226)."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(73)


class Square(nn.Module):
    def forward(self, x):
        return x * x  # sick: PA201 module=features.square


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)
        self.square = Square()

    def forward(self, x):
        return self.square(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Features()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.features(x))


x, y = 500 * torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
for step in range(5):
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(step, loss.item())
