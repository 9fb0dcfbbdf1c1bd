"""A model cast to half and trained with SGD and a static loss scale, without a float32 copy of the weights."""

import torch
from torch import nn

torch.manual_seed(27)
LOSS_SCALE = 256.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16).half(), torch.randint(0, 8, (32,))
model = Net().half()  # sick: PA111 module=. line=any
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(8):
    loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for p in model.parameters():
        p.grad /= LOSS_SCALE
    optimizer.step()
    print(step, loss.item())
