"""A switch for debugging left off: the region is entered with enabled=False and the run is float32."""

import argparse

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU())
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.encoder(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-amp", action="store_false", dest="amp", default=False)
    args = parser.parse_args()
    torch.manual_seed(23)
    x, y = torch.randn(32, 16), torch.randint(0, 8, (32,))
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):  # sick: PA109 module=-
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
