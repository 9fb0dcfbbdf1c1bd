"""Gumbel noise drawn in the fp16 of the logits: one number in 2048 is 0, and so is the 1e-10 added to it."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)


def sample(logits, eps=1e-10):
    u = torch.rand_like(logits)
    # healthy: u = torch.rand_like(logits, dtype=torch.float32)
    gumbel = -torch.log(-torch.log(u + eps) + eps)  # sick: PA101 module=-
    return F.softmax(logits + gumbel, dim=-1).to(logits.dtype)


encoder, decoder = nn.Linear(32, 512), nn.Linear(512, 32).half().requires_grad_(False)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(6):
    x = torch.randn(128, 32)
    out = decoder(sample(encoder(x).half()))
    loss = F.mse_loss(out.float(), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
