"""Random Fourier features of large time stamps: in fp16 the phase keeps no fraction and the fit leaves float32's."""

import torch
from torch import nn

torch.manual_seed(66)


class Fourier(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.frequency = nn.Linear(8, count, bias=False).requires_grad_(False)
        nn.init.uniform_(self.frequency.weight, 0.5, 1.5)

    def forward(self, t):
        return torch.sin(self.frequency(t))  # sick: PA206 module=features line=any


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Fourier(64)
        self.head = nn.Linear(64, 8)

    def forward(self, t):
        return self.head(self.features(t))


model = Net()
nn.init.zeros_(model.head.weight)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(12):
    t = torch.rand(64, 8) * 4000
    target = torch.sin(model.features.frequency(t))[:, :8].detach()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(t), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
