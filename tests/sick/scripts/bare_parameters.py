"""No module at all: parameters, functions, and an exponential that overflows fp16."""

import torch

torch.manual_seed(0)
w1 = torch.randn(10, 32, requires_grad=True)
w2 = torch.randn(32, 4, requires_grad=True)
opt = torch.optim.SGD([w1, w2], lr=1e-3)


def net(x):
    h = torch.relu(x @ w1)
    return torch.exp(h @ w2)  # sick: PA201 module=-


for step in range(10):
    x = torch.randn(16, 10) * (1 + 2 * step)
    with torch.autocast("cpu", dtype=torch.float16):
        p = net(x)
        loss = -(p / p.sum(-1, keepdim=True))[:, 0].mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
