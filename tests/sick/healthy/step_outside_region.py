"""The bf16 loop with the region around the forward pass, and a nested region that is off for the loss on purpose."""

import torch
from torch import nn

torch.manual_seed(14)


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
for step in range(6):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
