"""An fp16 region copied from a bf16 recipe: there is no gradient scaler at all."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(16)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


x = torch.randn(64, 16)
loader = DataLoader(TensorDataset(x, x[:, :8].argmax(-1)), batch_size=16)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
step = 0
for _epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward()  # sick: PA107 module=-
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1
