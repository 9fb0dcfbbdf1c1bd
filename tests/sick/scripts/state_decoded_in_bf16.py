"""The state of a recurrence, kept in a bfloat16 buffer and decoded token by token; evaluated only."""

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class Retention(nn.Module):
    state: Tensor

    def __init__(self, dim: int = 16, decay: float = 0.999) -> None:
        super().__init__()
        self.k, self.v, self.decay = nn.Linear(dim, dim), nn.Linear(dim, dim), decay
        self.register_buffer("state", torch.zeros(dim, dtype=torch.bfloat16))
        # healthy: self.register_buffer("state", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        self.state.mul_(self.decay).add_(self.v(x).square().mean(0))  # sick: PA212 module=.
        return torch.as_tensor(self.state * self.k(x))


model = Retention().eval()
with torch.inference_mode():
    for _ in range(1500):
        out = model(0.3 * torch.randn(4, 16))
print(f"state {model.state.float().mean().item():.3f}")
