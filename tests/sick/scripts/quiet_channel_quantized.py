"""A straight-through quantizer: the float16 scale of a quiet channel is zero."""

from typing import Any

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        scale = x.abs().amax(dim=0) / (2 ** (bits - 1) - 1)
        # healthy: scale = x.float().abs().amax(dim=0) / (2 ** (bits - 1) - 1)
        return torch.round(x / scale) * scale  # sick: PA201 module=quantize

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Quantizer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(Quantize.apply(x, 8))  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.quantize, self.out = nn.Linear(8, 8), Quantizer(), nn.Linear(8, 2)
        with torch.no_grad():
            self.inner.weight[3] *= 1e-6
            self.inner.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.quantize(self.inner(x))))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for _ in range(6):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).float(), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{loss.item():.4f}")
