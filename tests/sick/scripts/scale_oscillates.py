"""A scaler told to grow after every good step: it grows into an overflow, halves, and grows again."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(16, 32)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def main():
    torch.manual_seed(63)
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1)  # sick: PA203 module=- line=any
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step} scale {scaler.get_scale():g} loss {loss.item():.4f}")


main()
