"""Float32 masters kept by hand for a half model, but its BatchNorm keeps running statistics in fp16 as well."""

import torch
from torch import nn

torch.manual_seed(28)
LOSS_SCALE = 128.0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)
        self.bn = nn.BatchNorm1d(32)

    def forward(self, x):
        return torch.relu(self.bn(self.fc(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


model = Net()
masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
model.half()  # sick: PA111 module=encoder.bn line=any
optimizer = torch.optim.SGD(masters, lr=0.2)
x, y = torch.randn(32, 16).half(), torch.randint(0, 8, (32,))
for step in range(8):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), y)
    (loss * LOSS_SCALE).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float() / LOSS_SCALE
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    print(f"step {step} loss {loss.item():.4f}")
