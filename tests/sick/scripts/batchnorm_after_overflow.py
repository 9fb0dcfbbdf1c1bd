"""A conv stem with a gain too large for fp16 before BatchNorm, whose statistics it ruins (pytorch#88474)."""

import torch
from torch import nn

torch.manual_seed(51)


class Gain(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x * self.value  # sick: PA201 module=stem.gain


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.gain = Gain(60000.0)
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        return torch.relu(self.bn(self.gain(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Stem()
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.stem(x).mean(dim=(2, 3)))


images, labels = torch.randn(8, 8, 6, 6), torch.randint(0, 8, (8,))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(4):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
