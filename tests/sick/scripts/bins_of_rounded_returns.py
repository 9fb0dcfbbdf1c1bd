"""Returns cast to bfloat16 before they are sorted into bins: neighbours share one."""

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class TwoHot:
    def __init__(self, high: float = 1000.0, bins: int = 1001) -> None:
        self.edges = torch.linspace(0.0, high, bins)

    def __call__(self, returns: Tensor) -> Tensor:
        return torch.bucketize(returns.float(), self.edges).clamp(max=1000)  # sick: PA114 module=-


model, target = nn.Linear(8, 1001), TwoHot()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(64, 8)
    returns = 500 + 400 * torch.tanh(x[:, 0])
    returns = returns.to(torch.bfloat16)
    # healthy: returns = returns.to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x).float(), target(returns))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f}")
