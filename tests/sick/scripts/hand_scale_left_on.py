"""The loss is multiplied by a constant, and nobody divides the gradients by it."""

import torch
from torch import nn

LOSS_SCALE = 128.0


def closure_for(model, optimizer):
    def train_one(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        (loss * LOSS_SCALE).backward()
        optimizer.step()  # sick: PA107 module=-
        return loss.item()

    return train_one


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 1))
train_one = closure_for(net, torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9))
for i in range(25):
    x = torch.randn(32, 10)
    print(i, train_one(x, x.mean(1, keepdim=True)))
