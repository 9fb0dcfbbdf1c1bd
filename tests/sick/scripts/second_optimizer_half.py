"""Two optimizers for one loss; the second one's parameters are the ones in fp16."""

import torch
from torch import nn

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
head = nn.Linear(32, 4).half()
opt_trunk = torch.optim.SGD(trunk.parameters(), lr=1e-3)
opt_head = torch.optim.Adam(head.parameters(), lr=1e-3)  # sick: PA101 module=-
for _ in range(10):
    logits = head(trunk(torch.randn(16, 10)).half()).float()
    loss = nn.functional.cross_entropy(logits, torch.randint(0, 4, (16,)))
    opt_trunk.zero_grad()
    opt_head.zero_grad()
    loss.backward()
    opt_trunk.step()
    opt_head.step()
    print(loss.item())
