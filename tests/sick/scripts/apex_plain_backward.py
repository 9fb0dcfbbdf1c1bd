"""An Apex O1 script that calls loss.backward() itself: its fp16 gradients are never scaled."""

import torch
from apex import amp
from torch import nn

torch.manual_seed(72)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean(dim=(2, 3)))


images, labels = torch.randn(16, 8, 6, 6), torch.randint(0, 8, (16,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(6):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # sick: PA107 module=-
    optimizer.step()
    print(step, loss.item())
