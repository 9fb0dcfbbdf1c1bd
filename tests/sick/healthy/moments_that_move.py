"""Second moments of a bfloat16 model that move: by a smaller beta2, in an optimizer of preamp's, and in float32."""

import torch
from torch import nn

import preamp


def train(made, low):
    torch.manual_seed(64)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 8, bias=False)).to(low)
    optimizer = made(model)
    task = torch.randn(32, 8)
    for _ in range(160):
        x = torch.randn(64, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=low is torch.float32):
            loss = (model(x.to(low)).float() - torch.tanh(x @ task)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


train(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95)), torch.bfloat16)
train(lambda model: preamp.optim.AdamW(model.parameters(), lr=1e-2), torch.bfloat16)
train(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), torch.float32)
