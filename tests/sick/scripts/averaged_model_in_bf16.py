"""Stochastic weight averaging by torch's AveragedModel, kept in bfloat16 to save memory."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
average = AveragedModel(model).to(torch.bfloat16)
# healthy: average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
task = torch.randn(16, 8)
for _ in range(300):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(model(x), x @ task)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)  # sick: PA212 module=-
print("loss", round(loss.item(), 3))
