"""A triplet-style metric with a hand-written distance: its square root has an infinite slope where two points meet."""

import torch
from torch import nn

torch.manual_seed(45)


class Distance(nn.Module):
    def forward(self, a, b):
        squared = (a - b).square().sum(dim=-1)
        # healthy: return torch.linalg.vector_norm(a.float() - b.float(), dim=-1)
        return squared.sqrt()  # sick: PA201 module=metric
        # healthy:


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.metric = Distance()

    def forward(self, left, right):
        return self.metric(self.encoder(left), self.encoder(right))


model = Siamese()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
left, right = torch.randn(16, 16), torch.randn(16, 16)
same = torch.zeros(16)
right[3], same[3] = left[3], 1.0
for step in range(5):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        d = model(left, right).float()
        loss = (same * d.square() + (1 - same) * (2 - d).clamp(min=0).square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
