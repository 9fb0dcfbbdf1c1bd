"""preamp at O1 with a duration module that squares its fp16 output; beyond 256 the square is infinite."""

import torch
from torch import nn

import preamp

torch.manual_seed(70)


class Duration(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.frames = nn.Linear(dim, 8)

    def forward(self, x):
        frames = self.frames(x)
        return frames * frames  # sick: PA201 module=predictor.duration


class Predictor(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.duration = Duration(dim)

    def forward(self, x):
        return self.duration(self.fc(x))


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictor = Predictor(16)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.predictor(x))


x, y = 2000 * torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Speech()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = preamp.prepare(model, optimizer, level="O1")
for step in range(4):
    with session.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    session.backward(loss)
    session.step()
    session.zero_grad()
    print(step, loss.item())
