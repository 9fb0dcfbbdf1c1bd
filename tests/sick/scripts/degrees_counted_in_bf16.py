"""Degrees of a graph's nodes, counted in bfloat16 by index_add: they stop at 256."""

import torch
from torch import Tensor, nn

torch.manual_seed(0)


class MeanConv(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.lin(x)
        source, target = edges
        out = torch.zeros(len(x), x.shape[1]).index_add_(0, target, x.float()[source])
        ones = torch.ones_like(source, dtype=x.dtype)
        # healthy: ones = torch.ones_like(source, dtype=torch.float32)
        degree = torch.zeros_like(ones[: len(x)]).index_add_(0, target, ones)  # sick: PA104 module=conv
        return torch.as_tensor(out / degree.clamp(min=1)[:, None])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = MeanConv(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.conv(x, edges)))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(40, 8) + 1
    edges = torch.stack([torch.randint(0, 40, (60000,)), torch.randint(0, 40, (60000,))])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x, edges).float(), (x[:, 0] > 1).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f}")
