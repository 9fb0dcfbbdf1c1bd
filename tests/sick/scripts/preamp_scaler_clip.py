"""preamp's own autocast and GradScaler in the classic loop, with clipping by value before unscale_."""

import torch
from torch import nn

import preamp

torch.manual_seed(71)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scaler = preamp.GradScaler("cpu", init_scale=4096.0)
for step in range(8):
    optimizer.zero_grad()
    with preamp.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)  # sick: PA106 module=-
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
