"""A loader with eight batches, of which the sixth holds an infinite sensor reading."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(67)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


readings = torch.randn(64, 16)
readings[43, 7] = float("inf")
loader = DataLoader(TensorDataset(readings, torch.randint(0, 8, (64,))), batch_size=8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for i, (x, y) in enumerate(loader):  # sick: PA207 module=- line=any
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(i, loss.item())
