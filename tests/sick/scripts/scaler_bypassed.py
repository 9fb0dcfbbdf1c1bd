"""The loss is scaled, but the optimizer is stepped directly; Adam hides it because it divides the scale out."""

import torch
from torch import nn

torch.manual_seed(17)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(torch.relu(self.stem(x)).mean(dim=(2, 3)))


images, labels = torch.randn(16, 8, 6, 6), torch.randint(0, 8, (16,))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()  # sick: PA107 module=-
    print(step, loss.item())
