"""The optimizer is made, then the model is copied into bf16: the optimizer goes on stepping the float32 original."""

import copy

import torch
from torch import nn

torch.manual_seed(29)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model = copy.deepcopy(model).to(torch.bfloat16)  # sick: PA112 module=. line=any
x, y = torch.randn(32, 16).bfloat16(), torch.randint(0, 8, (32,))
for step in range(6):
    loss = nn.functional.cross_entropy(model(x).float(), y)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
