"""A critic with a slow target network, both bf16; the target follows with tau = 0.001."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn

dtype = torch.float32 if "--fp32" in sys.argv else torch.bfloat16
torch.manual_seed(15)
critic = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1)).to(dtype)
target = copy.deepcopy(critic)
# healthy: target = copy.deepcopy(critic).float()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
tau = 0.001
for step in range(40):
    x = torch.randn(64, 12)
    with torch.no_grad():
        goal = x[:, :1] + 0.9 * target(x.to(next(target.parameters()).dtype)).float()
    loss = F.mse_loss(critic(x.to(dtype)).float(), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for p, q in zip(critic.parameters(), target.parameters(), strict=True):
        q.data.copy_(tau * p.data + (1 - tau) * q.data)  # sick: PA212 module=-
    if step % 10 == 9:
        print(step, loss.item())
