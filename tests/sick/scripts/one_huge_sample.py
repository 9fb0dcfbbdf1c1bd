"""A sample in the wrong unit does not fit into float16; the model is made of torch's own modules."""

import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(96, 7)
data[50, 2] = 3.0e5
net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for batch in data.split(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(batch).square().mean()  # sick: PA201 module=0
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(loss.item())
