"""GELU by its tanh formula, checkpointed: its cube is infinite in float16, and so is the gradient of that."""

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class GELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)  # sick: PA201 module=1.act
        # healthy: inner = math.sqrt(2 / math.pi) * (x.float() + 0.044715 * x.float() ** 3)
        return 0.5 * x * (1 + torch.tanh(inner))


class Block(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, 4 * dim), GELU(), nn.Linear(4 * dim, dim)

    def inside(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.inside, x, use_reentrant=False))


model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for _ in range(5):
    x = 80 * torch.randn(16, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() / 80).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss.item():.4f}")
